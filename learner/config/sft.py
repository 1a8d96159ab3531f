"""Settings of the supervised warm start: section `sft` of the tree. Fields only; imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from learner.config.model import OptimSettings
from protocol.runtime.number_format import DtypeSetting


class SftSettings(OptimSettings):
    """`foray sft`: supervised fine-tuning on demonstrations. AdamW with float32 master weights, all weights trained.

    `run.seed`, `learner.model` (except dtype and lora), `learner.batch` (row_tokens, micro_batch_tokens) and
    `learner.engine.threads` apply as in the run; template and limits of episodes are those of `rollout.episode`.
    """

    lr: float = Field(default=2e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule after the warm-up, over all updates."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates of linear warm-up from lr / warmup_steps; not together with warmup_fraction."""
    warmup_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Warm-up as a share of all updates. Set it to 0 to give warmup_steps."""
    dtype: DtypeSetting = "auto"
    """Dtype of the weights in forward and backward passes, and of the model that is written. auto: bfloat16 on a GPU or
    a CPU that is faster in it, if the model has 10 million parameters or more; else float32."""
    batch_size: int = Field(default=8, ge=1)
    """Conversations per update."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the demonstrations, each in another order."""
    max_steps: int = Field(default=0, ge=0)
    """Maximum number of updates; 0: all of `epochs`. The schedule then covers these updates."""
    max_tokens: int = Field(default=4096, ge=2)
    """Longer conversations are left out."""
    eval_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the conversations that is not trained on, chosen by a hash of the question: their loss is measured after
    each epoch."""
    checkpoint_s: float = Field(default=300.0, ge=0)
    """Seconds between checkpoints: the maximum that a kill loses. 0: after every update."""
