"""Settings that algorithms share: clipping, off-policy corrections, divergence, entropy, aggregation.

Nothing heavy is imported here.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from learner.data.packing import Aggregation
from protocol.settings import Settings


def require_order(setting: str, low: float, high: float) -> None:
    """Raise ValueError for bounds that nothing is within."""
    if low > high:
        raise ValueError(f"{setting}.low {low:g} is above {setting}.high {high:g}: nothing is between them; set both")


Level = Literal["token", "sequence", "geometric"]
RejectionLevel = Literal["off", "token", "sequence", "geometric", "mean", "max"]
KlType = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k3++", "k4", "k5", "reverse", "forward"]
Proximal = Literal["behaviour", "recompute", "interpolate"]


class CorrectionSettings(Settings):
    """Importance weights old / behaviour on the loss. Only where `old_logprobs` is not `behaviour`: otherwise the
    surrogate's own ratio corrects for the sampler already, and a second weight would correct twice.
    """

    mode: Literal["truncate", "mask", "off"] = "truncate"
    """truncate: weights are limited to [low, high] (TIS); mask: those outside become 0 (MIS; IcePop at token level)."""
    level: Level = "token"
    """Weights of single tokens, of whole trajectories, or their geometric mean over the trajectory."""
    low: float = Field(default=0.0, ge=0)
    """Least weight."""
    high: float = Field(default=2.0, gt=0)
    """Greatest weight."""
    normalize: bool = False
    """Divide the weights by their mean over the batch: at level token over its trained tokens, at the others over its
    trajectories, long or short, as verl and slime do."""

    @model_validator(mode="after")
    def _ordered(self) -> CorrectionSettings:
        require_order("correction", self.low, self.high)
        return self


class CriterionSettings(Settings):
    """One measure of how much policy and engines disagree on a token or a trajectory, and its bounds."""

    measure: Literal["ratio", "k2", "k3"] = "ratio"
    """The ratio w = old / behaviour, or an estimate of their divergence in nats: log(w)^2 / 2, or w - log w - 1."""
    level: RejectionLevel = "off"
    """What is compared with the bounds, and left out: a token; or a whole trajectory by its tokens' product (k2, k3:
    sum; both `sequence`), their geometric mean (k2, k3: `mean`) or the worst of them (`max`)."""
    low: float = Field(default=0.5, ge=0)
    """Least ratio that is kept; k2 and k3 have no lower bound."""
    high: float = Field(default=2.0, gt=0)
    """Greatest ratio that is kept, or greatest divergence: to be set with k2 and k3 (verl's presets: 0.01 for a mean of
    k3)."""

    @model_validator(mode="after")
    def _possible(self) -> CriterionSettings:
        default = CriterionSettings.model_fields
        given = [name for name in ("measure", "low", "high") if getattr(self, name) != default[name].default]
        if self.level == "off":  # values, not which were set: a file written by `foray init` sets all
            if given:
                raise ValueError(f"rejection.{given[0]} does nothing at level off: set rejection.level, e.g. token")
            return self
        if self.measure == "ratio":
            require_order("rejection", self.low, self.high)
            if self.level == "mean":
                raise ValueError("rejection.level mean is for measure k2 and k3; that of ratios is geometric")
            return self
        if self.level == "geometric":
            raise ValueError(f"rejection.level geometric is for ratios; that of {self.measure} is mean")
        if "low" in given:
            raise ValueError(f"rejection.low is for ratios: {self.measure} has no lower bound")
        if "high" not in self.model_fields_set:
            raise ValueError(f"rejection.measure {self.measure} needs rejection.high, a divergence in nats")
        return self


class RejectionSettings(CriterionSettings):
    """Tokens that are left out of the loss because policy and engines disagree too much on them.

    The loss keeps the denominators of the whole batch: rejecting is no higher rate.
    """

    also: tuple[CriterionSettings, ...] = ()
    """Further criteria; what fails any of them is left out."""
    second_moment: float = Field(default=0.0, ge=0)
    """Tokens with the largest log(w)^2 are left out until the mean of what stays is below this, over the batch (M2PO,
    arXiv 2510.01161: 0.04; AReaL's `m2_threshold`). The bound on log(w)^2 is found before the first update, which takes
    a pass of the policy over the batch. 0: none is."""
    veto: float = Field(default=0.0, ge=0)
    """A trajectory with any token below this ratio is left out; 0: none is."""
    off_policy: float = Field(default=0.0, ge=0)
    """A trajectory with a negative advantage is left out when it has become less likely than this, in nats a token
    since it was sampled: a mistake that the policy no longer makes (DeepSeek-V3.2, arXiv 2512.02556); 0: none is."""

    @model_validator(mode="after")
    def _all_reject(self) -> RejectionSettings:
        if any(criterion.level == "off" for criterion in self.also):
            raise ValueError("a criterion of rejection.also rejects nothing without a level: e.g. level: token")
        return self


class KlSettings(Settings):
    """Divergence from the reference (`learner.reference`)."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight; 0 needs no reference model."""
    type: KlType = "k3"
    """Estimator from the sampled token (docs/algorithms.md says what each one's gradient is), or the divergence over
    the `top` likeliest tokens with an exact tail: reverse = KL(policy || reference), forward the other way round."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss, or taken off the rewards of tokens before advantages are computed."""
    top: int = Field(default=32, ge=0)
    """reverse and forward: tokens that are summed over; what is left is estimated from the sampled one."""
    importance: bool = False
    """Weigh the estimate by policy / old, at most 10: tokens are of the old policy (reverse, forward: tail only)."""
    target: float = Field(default=0.0, ge=0)
    """Divergence that an adaptive coefficient aims at (Ziegler et al., arXiv 1909.08593); 0: it is fixed."""
    horizon: int = Field(default=10_000, ge=1)
    """Trajectories over which the adaptive coefficient moves."""

    @model_validator(mode="after")
    def _consistent(self) -> KlSettings:
        if self.place == "reward" and self.type not in ("k1", "k2", "k3", "abs"):
            raise ValueError(f"kl.type {self.type} has no value for each token that a reward could lose")
        if self.target and self.place == "loss":
            raise ValueError("kl.target (an adaptive coefficient) is for kl.place reward")
        return self


class RewardKlSettings(KlSettings):
    """The divergence taken off the rewards, as PPO and REINFORCE++ do."""

    type: KlType = "k1"
    place: Literal["loss", "reward"] = "reward"


class TopKlSettings(KlSettings):
    """The divergence over the likeliest tokens, as EMA-PG has it."""

    coefficient: float = Field(default=1e-3, ge=0)
    type: KlType = "reverse"
    importance: bool = True


class DistillKlSettings(KlSettings):
    """The divergence as the whole objective. k1+ has the gradient of prime-rl's `ref_kl`: log(policy / reference) as a
    loss of each token; `reverse` and `forward` look at the likeliest tokens beside it.
    """

    coefficient: float = Field(default=1.0, ge=0)
    type: KlType = "k1+"
    importance: bool = True


class PolicySettings(Settings):
    """What every algorithm shares."""

    token_level_rewards: ClassVar[bool] = False
    """Whether advantages are made of the rewards of tokens."""

    type: str = ""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped at 1 + clip_high; more than clip_low lets rare tokens grow (DAPO, arXiv 2503.14476)."""
    dual_clip: float = Field(default=3.0, ge=0)
    """Bound c > 1 on the clipped loss of tokens with a negative advantage, c * |A| (arXiv 1912.09729; 3 as in verl);
    0: none. Without it the ratio of one token that engine and learner disagree on can be most of a gradient."""
    old_logprobs: Proximal = "behaviour"
    """Proximal policy: the engines' own log-probs; the learner's before the update (decoupled PPO, arXiv 2505.24298);
    or one between them by the token's lag, without the pass that recomputing takes."""
    correction: CorrectionSettings = CorrectionSettings()
    """Importance weights, where old_logprobs is not behaviour."""
    rejection: RejectionSettings = RejectionSettings()
    """Tokens left out."""
    epochs: int = Field(default=1, ge=1, le=16)
    """Passes over each batch."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of a batch, each with its own optimiser update in every pass."""
    kl: KlSettings = KlSettings()
    """Divergence from a reference."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    drift_coefficient: float = Field(default=0.0, ge=0)
    """Weight of log(policy / old)^2 of every token, whatever a clip or a rejection leaves out (prime-rl's `kl_tau`:
    0.001; with `reinforce` and no correction it is verl's DRO at half its beta). It starts with the second update of a
    batch where old_logprobs is recompute: in the first one the policy is `old`, and both value and gradient are 0."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number; every denominator is of the whole batch (of the update)."""
    aggregation_length: int = Field(default=0, ge=0)
    """seq_mean_token_sum(_norm): constant that the sum is divided by (Dr. GRPO, arXiv 2503.20783); 0 = not divided."""
    reward_scale: Literal["none", "batch", "running"] = "none"
    """Rewards of tokens are divided by the deviation of the batch's trajectories, or of all seen so far; not centred.
    For advantages of tokens (ppo, reinforce_pp): groups are their own measure."""
    whiten: bool = False
    """Advantages of the batch's tokens get mean 0 and deviation 1, over all ranks."""
    filter: bool = False
    """Groups whose trajectories all have the same reward are not trained but replaced (dynamic sampling of DAPO)."""

    @property
    def group_baseline(self) -> bool:
        """Whether a trajectory is compared with its group alone, so that one without siblings has advantage 0."""
        return False

    @model_validator(mode="after")
    def _consistent(self) -> PolicySettings:
        if 0 < self.dual_clip <= 1:
            raise ValueError("dual_clip must be above 1, or 0 for none")
        if self.kl.place == "reward" and not self.token_level_rewards:
            raise ValueError("kl.place reward needs advantages of tokens (ppo, reinforce_pp); this has those of groups")
        if self.reward_scale != "none" and not self.token_level_rewards:
            raise ValueError("reward_scale is for advantages of tokens (ppo, reinforce_pp)")
        if self.aggregation == "seq_mean_token_sum_norm" and not self.aggregation_length:
            raise ValueError("aggregation seq_mean_token_sum_norm needs an aggregation_length")
        if self.correction.normalize and self.old_logprobs == "interpolate":
            raise ValueError("correction.normalize needs the proximal policy before the update: recompute it")
        if self.rejection.second_moment and self.old_logprobs == "interpolate":
            raise ValueError("rejection.second_moment needs the ratios before the update: old_logprobs recompute")
        return self


class GroupSettings(PolicySettings):
    """Advantage: the reward against its group's mean (GRPO, arXiv 2402.03300)."""

    estimator: Literal["grpo", "rloo", "opo", "max_rl", "pass_at_k"] = "grpo"
    """grpo: reward against the group's mean; rloo: against the others' mean; opo: against the mean weighed by length
    (arXiv 2505.23585); max_rl: in units of the mean; pass_at_k: only the best of the group, against the second
    (arXiv 2503.19595). The fields below are for grpo and, but for batch, pass_at_k."""
    turns: Literal["off", "turn", "group"] = "off"
    """Rewards of turns as they are earned (process supervision of GRPO, arXiv 2402.03300, section 4.1.3) instead of
    their sum: compared with the same turn of the siblings, or with all their turns; a turn counts what follows it."""
    turn_gamma: float = Field(default=1.0, gt=0, le=1)
    """turns: discount from turn to turn."""
    std: Literal["group", "batch", "none"] = "group"
    """What the difference is divided by: the group's standard deviation, the batch's, or nothing (Dr. GRPO)."""
    std_ddof: Literal[0, 1] = 1
    """1: the deviation divides by n - 1, as verl, TRL and OpenRLHF do."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    parts: dict[str, float] = Field(default_factory=dict, max_length=64)
    """Parts of the reward by name, each with its weight: every part is compared in its group by itself, and the
    advantages are summed (GDPO, arXiv 2601.05242; TRL's `normalize_then_sum`), so that a part of small spread is not
    drowned. Empty: the reward as a whole."""
    normalize_batch: bool = False
    """Advantages of trajectories get mean 0 and deviation 1 over the batch, as GDPO and TRL end (`std_ddof`,
    `epsilon`); verl's GDPO does so over tokens: `whiten`."""

    @model_validator(mode="after")
    def _parts_are_of_trajectories(self) -> GroupSettings:
        if self.parts and self.turns != "off":
            raise ValueError("parts are those of a trajectory's reward: not with rewards of turns")
        if self.parts and not any(self.parts.values()):
            raise ValueError("parts has no weight but 0: every advantage would be 0")
        if self.normalize_batch and self.turns != "off":
            raise ValueError("normalize_batch is for advantages of trajectories: not with rewards of turns; see whiten")
        if self.turns != "off" and (self.estimator, self.std) != ("grpo", "group"):
            raise ValueError("rewards of turns are compared by estimator grpo with std group alone; others are ignored")
        return self

    @property
    def group_baseline(self) -> bool:
        """All estimators compare siblings; turns: group also compares the turns of one trajectory."""
        return self.turns != "group"
