"""Which accelerator DeepSpeed takes, said before transformers imports it: else it warns in the middle of the screen."""

from __future__ import annotations

import os


def without_gpu() -> None:
    """Tell DeepSpeed where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
