"""Settings of the optimiser and of DeepSpeed. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.settings import Settings


class OptimSettings(Settings):
    """AdamW and its learning rate."""

    lr: float = Field(default=1e-6, gt=0)
    """Highest learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; vectors (norms, biases) never decay."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 = never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, over run.steps steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise from lr / warmup_steps."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """linear and cosine end at this share of lr."""


class EngineSettings(Settings):
    """DeepSpeed."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is partitioned over the ranks: nothing, optimiser, and gradients, and parameters."""
    threads: int = Field(default=0, ge=0)
    """Threads torch computes with on a CPU; 0 = its own choice. The same bits come only of the same number."""
