"""Settings of the algorithms.

Nothing heavy is imported here: an algorithm's settings carry a lazy `build()` that imports torch when it is called.
To add an algorithm: one file in `algorithms/`, one settings class and one line in `AlgorithmSettings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

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
