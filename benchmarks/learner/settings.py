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
    """The trajectories. Base of the packing benchmark and the learner benchmark."""

    groups: int = Field(default=64, ge=1)
    """Questions in the batch."""
    group_size: int = Field(default=8, ge=2)
    """Trajectories per question."""
    turns: int = Field(default=4, ge=1)
    """Maximum turns of a trajectory; the number is drawn from 1 to this."""
    prompt_tokens: int = Field(default=128, ge=1)
    """Tokens per prompt."""
    turn_tokens: int = Field(default=96, ge=1)
    """Median tokens that the policy writes per turn."""
    observation_tokens: int = Field(default=256, ge=0)
    """Median tokens of an observation."""
    sigma: float = Field(default=0.8, ge=0)
    """Standard deviation of the logarithm of both lengths."""
    longest: int = Field(default=4096, ge=2)
    """Maximum tokens of a trajectory; longer ones are truncated."""
    vocabulary: int = Field(default=16384, ge=32)
    """Size of the vocabulary to draw token ids from."""
    seed: int = 0
    """Random seed."""


class LearnerBench(SkewedBatch):
    """Settings of `foray bench learner`."""

    help: ClassVar[str] = "trained tokens/s against a padded transformers loop and TRL's GRPO step"
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
        Target("kept_with_signs", 0.97, "trained tokens a second with the signs of collapse over those without"),
        Target("kept_with_preserve", 0.97, "trained tokens a second with signs and preserve over those without"),
    )
    runner: ClassVar[str] = "benchmarks.learner.bench:measure"
    modules: ClassVar[tuple[str, ...]] = ("protocol", "learner", "benchmarks/learner/*.py")

    groups: int = Field(default=4, ge=1)
    """Questions in the batch."""
    prompt_tokens: int = Field(default=64, ge=1)
    """Tokens per prompt."""
    turn_tokens: int = Field(default=32, ge=1)
    """Median tokens that the policy writes per turn."""
    observation_tokens: int = Field(default=96, ge=0)
    """Median tokens of an observation."""
    longest: int = Field(default=1536, ge=2)
    """Maximum tokens of a trajectory; longer ones are truncated."""
    shape: Literal["tiny", "small", "135m", "0.5b", "1.5b"] = "small"
    """Size of the trained Qwen2, with random weights: 0.2 or 3 million parameters, that of SmolLM2-135M, or one of
    Qwen2.5; all without the embeddings, whose size follows from `vocabulary`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the computation. The optimiser always uses float32."""
    row_tokens: int = Field(default=1536, ge=0)
    """Foray: tokens per packed row; 0: one row per trajectory."""
    micro_batch_tokens: int = Field(default=4608, ge=1)
    """Foray: maximum tokens per forward pass. The others use the same number of passes."""
    vocabulary: int = Field(default=2048, ge=32)
    """Size of the vocabulary, and so of the output layer; 2048 with `small` is 0.14 of its matrix products."""
    logit_chunk_mb: int = Field(default=64, ge=1)
    """Foray: learner.model.logit_chunk_bytes, in MiB."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, in all contenders."""
    rounds: int = Field(default=3, ge=1)
    """Number of rounds, of which the median counts, after one warm-up round."""
    threads: int = Field(default=1, ge=1)
    """torch threads, in all contenders. A GPU is used if there is one."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW."""
    trl_python: str = ""
    """Python interpreter of an environment with TRL. Empty: FORAY_TRL_PYTHON; without either, TRL is skipped."""
    only: str = ""
    """Contenders besides Foray, comma-separated (unfused, padded, padded_sorted, trl). Empty: all of these.
    Also unmeasured (learner.rescored_share 0) and preserve (learner.algorithm.preserve on), compared in each round."""

    def trl_interpreter(self) -> str:
        """Return the Python interpreter with TRL, "" if there is none."""
        return self.trl_python or os.environ.get(TRL_VARIABLE, "")
