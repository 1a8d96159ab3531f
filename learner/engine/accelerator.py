"""Set DeepSpeed's accelerator before transformers imports it; otherwise it prints a warning to the terminal."""

from __future__ import annotations

import os


def without_gpu() -> None:
    """Set DeepSpeed's accelerator to the CPU if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
