"""Settings of `foray bench learner`."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

from pydantic import Field

from benchmarks.base import BenchSettings, Target

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""Clip range of the ratio, of every contender."""
TRL_VARIABLE = "FORAY_TRL_PYTHON"


class SkewedBatch(BenchSettings):
    """Which trajectories. Base of the benchmarks of packing and of the learner."""

    groups: int = Field(default=64, ge=1)
    """Questions in the batch."""
    group_size: int = Field(default=8, ge=2)
    """Trajectories of each."""
    turns: int = Field(default=4, ge=1)
    """Most turns of a trajectory; how many it takes is drawn from 1 to this."""
    prompt_tokens: int = Field(default=128, ge=1)
    """Tokens of each prompt."""
    turn_tokens: int = Field(default=96, ge=1)
    """Median tokens that the policy writes a turn."""
    observation_tokens: int = Field(default=256, ge=0)
    """Median tokens of what one search found."""
    sigma: float = Field(default=0.8, ge=0)
    """Standard deviation of the logarithm of both."""
    longest: int = Field(default=4096, ge=2)
    """Trajectories are cut at this many tokens."""
    vocabulary: int = Field(default=16384, ge=32)
    """Number of ids to draw from."""
    seed: int = 0
    """Of all that is drawn."""


class LearnerBench(SkewedBatch):
    """The batch, the model, and how the step is cut."""

    help: ClassVar[str] = "trained tokens a second against a padded transformers loop and TRL's GRPO step"
    quick: ClassVar[dict[str, Any]] = {
        "groups": 2,
        "group_size": 4,
        "longest": 384,
        "row_tokens": 384,
        "micro_batch_tokens": 768,
        "shape": "tiny",
        "vocabulary": 2048,
        "rounds": 1,
    }
    targets: ClassVar[tuple[Target, ...]] = (
        Target("ratio", 1.0, "trained tokens a second over the better padded transformers loop"),
        Target("ratio_trl", 3.0, "trained tokens a second over TRL's GRPO step"),
    )
    runner: ClassVar[str] = "benchmarks.learner.bench:measure"
    modules: ClassVar[tuple[str, ...]] = ("protocol", "learner", "benchmarks/learner/*.py")

    groups: int = Field(default=4, ge=1)
    """Questions in the batch."""
    prompt_tokens: int = Field(default=64, ge=1)
    """Tokens of each prompt."""
    turn_tokens: int = Field(default=32, ge=1)
    """Median tokens that the policy writes a turn."""
    observation_tokens: int = Field(default=96, ge=0)
    """Median tokens of what one search found."""
    longest: int = Field(default=1536, ge=2)
    """Trajectories are cut at this many tokens."""
    shape: Literal["tiny", "small", "0.5b", "1.5b"] = "small"
    """Size of the Qwen2 that is trained, with random weights: 0.2 and 3 million parameters and those of Qwen2.5, all
    without the embeddings, which `vocabulary` sizes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which is computed. The optimiser has float32 everywhere."""
    row_tokens: int = Field(default=1536, ge=0)
    """Tokens of a packed row of ours; 0: a row for each trajectory."""
    micro_batch_tokens: int = Field(default=4608, ge=1)
    """Most tokens of one forward pass of ours. Others divide the trajectories into as many passes."""
    vocabulary: int = Field(default=2048, ge=32)
    """Words, of which the output layer is made; 2048 beside `small` make 0.14 of its matrix products."""
    logit_chunk_mb: int = Field(default=64, ge=1)
    """learner.model.logit_chunk_bytes of ours, in MiB."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, everywhere."""
    rounds: int = Field(default=3, ge=1)
    """Repetitions, of which the median counts; one more goes before to warm up."""
    threads: int = Field(default=1, ge=1)
    """Threads of torch, everywhere. A GPU is used when there is one."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW."""
    trl_python: str = ""
    """Interpreter of an environment that holds TRL; empty: what FORAY_TRL_PYTHON says; with neither it is left out."""
    only: str = ""
    """Contenders beside ours, by name and with commas (unfused, padded, padded_sorted, trl); empty: all."""

    def trl_interpreter(self) -> str:
        """Return the interpreter that TRL is to be run by; empty: none."""
        return self.trl_python or os.environ.get(TRL_VARIABLE, "")
