"""Which accelerator DeepSpeed takes, said before transformers imports it: else it warns in the middle of the screen."""

from __future__ import annotations

import os


def without_gpu() -> bool:
    """Whether there is no GPU; DeepSpeed is then told so."""
    import torch

    if torch.cuda.is_available():
        return False
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return True
