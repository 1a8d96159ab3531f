"""Settings of the models that the learner holds. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.settings import Settings


class ModelSettings(Settings):
    """How the policy is held and computed."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in the forward pass; the optimiser keeps float32 (bfloat16 needs zero_stage 1 or more)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    logit_chunk_bytes: int = Field(default=256 << 20, ge=1 << 10)
    """Most bytes of float32 logits held at once; beyond it they are computed in chunks, twice."""
