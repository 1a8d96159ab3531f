"""Settings of the computing half of the learner: algorithm, batch, optimiser, model, DeepSpeed.

Nothing heavy is imported here: an algorithm's settings carry a lazy `build()` that imports torch when it is called.
To add an algorithm: one file in `algorithms/`, one settings class and one line in `AlgorithmSettings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from learner.aggregation import Aggregation
from protocol.settings import Settings

if TYPE_CHECKING:
    from learner.algorithms.base import Algorithm


class SurrogateSettings(Settings):
    """What every algorithm with a clipped surrogate shares."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped at 1 + clip_high; more than clip_low lets rare tokens grow (DAPO, arXiv 2503.14476)."""
    old_logprobs: Literal["behaviour", "recompute"] = "behaviour"
    """Proximal policy: the engines' own log-probs, or the learner's before the update (arXiv 2505.24298)."""
    importance_cap: float = Field(default=2.0, ge=0)
    """With old_logprobs: recompute, tokens weigh min(old / behaviour, this); 0 leaves the weight out."""
    epochs: int = Field(default=1, ge=1, le=16)
    """Optimiser updates on each batch."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the frozen initial policy; 0 needs no reference model."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence (Schulman, "Approximating KL divergence"); k1 has no useful gradient of its own."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number; every denominator is of the whole batch."""
    aggregation_length: int = Field(default=0, ge=0)
    """seq_mean_token_sum only: constant that the sum is divided by (Dr. GRPO, arXiv 2503.20783); 0 = not divided."""


class GrpoSettings(SurrogateSettings):
    """Group relative policy optimisation (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation; false gives Dr. GRPO."""
    std_ddof: Literal[0, 1] = 1
    """1: the group's deviation divides by n - 1, as verl, TRL and OpenRLHF do."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""

    def build(self) -> Algorithm:
        """The algorithm; imports torch."""
        from learner.algorithms.grpo import Grpo

        return Grpo(self)


class RlooSettings(SurrogateSettings):
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740), clipped."""

    type: Literal["rloo"] = "rloo"

    def build(self) -> Algorithm:
        """The algorithm; imports torch."""
        from learner.algorithms.rloo import Rloo

        return Rloo(self)


def _tag(value: Any) -> str:
    given = value.get("type", "grpo") if isinstance(value, dict) else getattr(value, "type", "grpo")
    return str(given)


AlgorithmSettings = Annotated[
    Annotated[GrpoSettings, Tag("grpo")] | Annotated[RlooSettings, Tag("rloo")],
    Discriminator(_tag),
]
"""Union over `type`; without one it is `grpo`."""


class BatchSettings(Settings):
    """How groups become micro-batches."""

    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens, padding included, in one forward pass; a longer trajectory goes alone. GPUs like many more."""
    row_tokens: int = Field(default=0, ge=0)
    """Trajectories are packed into rows of so many tokens (or of the longest one); 0 = each has a row of its own."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted among all trajectories of the batch before advantages are computed, so
    that there is nothing to learn. The metrics still show the true rewards."""


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


class ModelSettings(Settings):
    """How the policy is held and computed."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in the forward pass; the optimiser keeps float32 (bfloat16 needs zero_stage 1 or more)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    logit_chunk_bytes: int = Field(default=256 << 20, ge=1 << 10)
    """Most bytes of float32 logits held at once; beyond it they are computed in chunks, twice."""


class EngineSettings(Settings):
    """DeepSpeed."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is partitioned over the ranks: nothing, optimiser, and gradients, and parameters."""
    threads: int = Field(default=0, ge=0)
    """Threads torch computes with on a CPU; 0 = its own choice. The same bits come only of the same number."""


class TrainerSettings(Settings):
    """All of the above: base class of the learner's section."""

    algorithm: AlgorithmSettings = GrpoSettings()
    """What is minimised."""
    batch: BatchSettings = BatchSettings()
    """How groups are packed."""
    optim: OptimSettings = OptimSettings()
    """How weights move."""
    model: ModelSettings = ModelSettings()
    """How the policy is computed."""
    engine: EngineSettings = EngineSettings()
    """How it is distributed."""

    @model_validator(mode="after")
    def _bfloat16_needs_zero(self) -> TrainerSettings:
        # DeepSpeed's stage 0 silently takes an optimiser of another kind for bfloat16.
        if self.model.dtype == "bfloat16" and self.engine.zero_stage == 0:
            raise ValueError("model.dtype bfloat16 needs engine.zero_stage 1, 2 or 3")
        return self
