"""Settings of the algorithms, one class each: fields only, no torch.

To add an algorithm: write one file in `learner/algorithms/`, its settings class and one line in `REGISTRY` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from learner.config.policy import (
    DistillKlSettings,
    GroupSettings,
    PolicySettings,
    Proximal,
    RewardKlSettings,
    TopKlSettings,
    TrajectoryCorrectionSettings,
)
from learner.data.packing import Aggregation
from protocol.settings import union_of


class GrpoSettings(GroupSettings):
    """Group relative policy optimisation (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"


class DrGrpoSettings(GroupSettings):
    """GRPO without its two biases (arXiv 2503.20783): no division by a deviation or a length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    std: Literal["group", "batch", "none"] = "none"
    aggregation: Aggregation = "seq_mean_token_sum"
    aggregation_length: int = Field(default=1024, ge=1)


class DapoSettings(GroupSettings):
    """Decoupled clip and dynamic sampling (arXiv 2503.14476)."""

    type: Literal["dapo"] = "dapo"
    filter: bool = True
    overlong_length: int = Field(default=0, ge=0)
    """Sampled tokens in a trajectory from which the full `overlong_penalty` applies; 0: no shaping."""
    overlong_buffer: int = Field(default=0, ge=0)
    """The penalty grows linearly over this many tokens before overlong_length."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Subtracted from the reward at overlong_length and beyond."""

    @model_validator(mode="after")
    def _shapes_the_whole(self) -> DapoSettings:
        if self.parts and self.overlong_length:
            raise ValueError("overlong_length shapes the whole reward and cannot be combined with parts")
        return self


class RlooSettings(PolicySettings):
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740), clipped."""

    type: Literal["rloo"] = "rloo"

    @property
    def group_baseline(self) -> bool:
        """Return True: the baseline is the mean of the others in the group."""
        return True


class ReinforceSettings(PolicySettings):
    """REINFORCE (Williams 1992): -A log pi, no clipping; importance weights where old_logprobs is not behaviour."""

    type: Literal["reinforce"] = "reinforce"
    old_logprobs: Proximal = "recompute"
    baseline: Literal["none", "batch", "group"] = "batch"
    """Baseline that is subtracted from the reward."""

    @property
    def group_baseline(self) -> bool:
        """Return whether `baseline` is the group's."""
        return self.baseline == "group"


class TokenRewardSettings(PolicySettings):
    """Algorithms with a reward per token, from which the divergence is subtracted."""

    token_level_rewards: ClassVar[bool] = True
    kl: RewardKlSettings = RewardKlSettings()
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    whiten: bool = True


class ReinforcePpSettings(TokenRewardSettings):
    """REINFORCE++ (arXiv 2501.03262): discounted rewards of tokens minus the divergence, whitened."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    """group: rewards are centred in their group first (REINFORCE++-baseline)."""

    @property
    def group_baseline(self) -> bool:
        """Return whether `baseline` is the group's."""
        return self.baseline == "group"


class PpoSettings(TokenRewardSettings):
    """Proximal policy optimisation with a critic (arXiv 1707.06347; `learner.critic`)."""

    type: Literal["ppo"] = "ppo"
    clip_high: float = Field(default=0.2, ge=0)
    old_logprobs: Proximal = "recompute"
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation (arXiv 1506.02438)."""
    bootstrap_truncated: bool = True
    """A truncated trajectory (cut off by the token budget) also earns the critic's value of the state after its last
    token, as in AReaL: the missing rest is not worth 0. Answers and spent turns end a trajectory for good."""


class GspoSettings(GroupSettings):
    """Group sequence policy optimisation (arXiv 2507.18071): ratio and clip per trajectory."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, lt=1)
    clip_high: float = Field(default=4e-4, ge=0)
    old_logprobs: Proximal = "recompute"
    correction: TrajectoryCorrectionSettings = TrajectoryCorrectionSettings()
    aggregation: Aggregation = "seq_mean_token_mean"


class GmpoSettings(GroupSettings):
    """Geometric-mean policy optimisation (arXiv 2507.20673): bounds apply to log-ratios."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0)
    """A token's log-ratio is clipped at -clip_low."""
    clip_high: float = Field(default=0.4, ge=0)
    """A token's log-ratio is clipped at clip_high."""
    old_logprobs: Proximal = "recompute"
    correction: TrajectoryCorrectionSettings = TrajectoryCorrectionSettings()
    aggregation: Aggregation = "seq_mean_token_mean"


class CispoSettings(GroupSettings):
    """Clipped importance weights instead of clipped updates (MiniMax-M1, arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is clipped at 1 - clip_low; 1 means no lower bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is clipped at 1 + clip_high."""


class SapoSettings(GroupSettings):
    """Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate instead of the clip."""

    type: Literal["sapo"] = "sapo"


class GpgSettings(PolicySettings):
    """Group policy gradient (arXiv 2504.02546): -A log pi, with advantages rescaled for groups without a learning
    signal."""

    type: Literal["gpg"] = "gpg"
    old_logprobs: Proximal = "recompute"

    @property
    def group_baseline(self) -> bool:
        """Return True: rewards are centred in their group."""
        return True


class EmaPgSettings(GroupSettings):
    """GRPO with a top-k divergence from a moving average of the policy (arXiv 2602.04417; `learner.reference.kind:
    ema`)."""

    type: Literal["ema_pg"] = "ema_pg"
    kl: TopKlSettings = TopKlSettings()


class DecoupledPpoSettings(GroupSettings):
    """Decoupled PPO for asynchronous data (AReaL, arXiv 2505.24298): the clip is around a proximal policy;
    importance weights correct from the behaviour policy to it. GRPO's advantages, no critic.
    """

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    old_logprobs: Proximal = "interpolate"


class DppoSettings(GroupSettings):
    """Divergence PPO (arXiv 2602.04879): bounds how far a token's probability moves, not its ratio. prime-rl's default
    loss: ratio_cap 0, drift_coefficient 0.001; its IPO also sets symmetric, and bounds of 0.1.
    """

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Over "this token" and "another": difference of the token's probabilities, or KL(old || policy) in nats."""
    clip_low: float = Field(default=0.2, ge=0)
    """Drop tokens whose probability has fallen by more than this and would fall further."""
    clip_high: float = Field(default=0.2, ge=0)
    """Drop tokens whose probability has risen by more than this and would rise further. With tv, 1 disables it."""
    symmetric: bool = False
    """Drop tokens by their movement alone, whatever the sign of their advantage."""
    ratio_cap: float = Field(default=20.0, ge=0)
    """Cap on the ratio that weights a token's gradient; 0: no cap."""


class DistillSettings(PolicySettings):
    """On-policy distillation (arXiv 2306.13649): minimises only the divergence from the reference, on text that the
    policy wrote (prime-rl's `ref_kl`). Rewards are only reported. Needs `learner.reference.model`, the teacher.
    """

    type: Literal["distill"] = "distill"
    kl: DistillKlSettings = DistillKlSettings()
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Drop tokens whose probability has fallen by more than this since sampling; 1: off."""
    clip_high: float = Field(default=1.0, ge=0)
    """Drop tokens whose probability has risen by more than this since sampling; 1: off."""
    drift_coefficient: float = Field(default=1e-3, ge=0)

    @model_validator(mode="after")
    def _minimises_something(self) -> DistillSettings:
        if not self.kl.coefficient:
            raise ValueError("algorithm distill minimises the divergence: set kl.coefficient above 0")
        if self.kl.type == "k1" and not self.kl.importance:
            raise ValueError("kl.type k1 without kl.importance has an expected gradient of 0: use k1+ or reverse")
        if self.preserve.coefficient:
            raise ValueError(
                "preserve concerns trajectories with a positive advantage, and distill has none: remove it"
            )
        if self.filter or self.whiten:
            name = "filter" if self.filter else "whiten"
            raise ValueError(f"algorithm distill does not train on rewards: remove {name}, which concerns them")
        return self


REGISTRY: dict[type[PolicySettings], str] = {
    GrpoSettings: "learner.algorithms.grpo:Grpo",
    DrGrpoSettings: "learner.algorithms.grpo:Grpo",
    DapoSettings: "learner.algorithms.dapo:Dapo",
    RlooSettings: "learner.algorithms.rloo:Rloo",
    ReinforceSettings: "learner.algorithms.reinforce:Reinforce",
    ReinforcePpSettings: "learner.algorithms.reinforce_pp:ReinforcePp",
    PpoSettings: "learner.algorithms.ppo:Ppo",
    GspoSettings: "learner.algorithms.gspo:Gspo",
    GmpoSettings: "learner.algorithms.gmpo:Gmpo",
    CispoSettings: "learner.algorithms.cispo:Cispo",
    SapoSettings: "learner.algorithms.sapo:Sapo",
    GpgSettings: "learner.algorithms.gpg:Gpg",
    EmaPgSettings: "learner.algorithms.grpo:Grpo",
    DecoupledPpoSettings: "learner.algorithms.grpo:Grpo",
    DppoSettings: "learner.algorithms.dppo:Dppo",
    DistillSettings: "learner.algorithms.distill:Distill",
}
"""Settings class -> "module:Class"; the class takes the settings."""

if TYPE_CHECKING:
    AlgorithmSettings = PolicySettings
else:
    AlgorithmSettings = union_of(REGISTRY, default="grpo")
