"""Settings that algorithms share: clipping, off-policy corrections, divergence, entropy, aggregation.

Nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from learner.data.packing import Aggregation
from protocol.settings import Settings


def require_order(setting: str, low: float, high: float) -> None:
    """Raise ValueError if low > high."""
    if low > high:
        raise ValueError(f"{setting}.low {low:g} is above {setting}.high {high:g}: set both")


Level = Literal["token", "sequence", "geometric"]
RejectionLevel = Literal["off", "token", "sequence", "geometric", "mean", "max"]
KlType = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k3++", "k4", "k5", "reverse", "forward"]
Proximal = Literal["behaviour", "recompute", "interpolate"]


class CorrectionSettings(Settings):
    """Importance weights old / behaviour on the loss. Only if `old_logprobs` is not `behaviour`: otherwise the
    surrogate's own ratio already corrects for the sampler, and a second weight would correct twice.
    """

    mode: Literal["truncate", "mask", "off"] = "truncate"
    """truncate: weights are clipped to [low, high] (TIS); mask: those outside become 0 (MIS; IcePop at token level)."""
    level: Level = "token"
    """Weights per token, per trajectory, or the geometric mean over the trajectory."""
    low: float = Field(default=0.0, ge=0)
    """Minimum weight."""
    high: float = Field(default=2.0, gt=0)
    """Maximum weight."""
    normalize: bool = False
    """Divide the weights by their mean over the batch: over its trained tokens at level token, otherwise over its
    trajectories regardless of length, as verl and slime do."""

    @model_validator(mode="after")
    def _ordered(self) -> CorrectionSettings:
        require_order("correction", self.low, self.high)
        return self


class TrajectoryCorrectionSettings(CorrectionSettings):
    """The weights of losses whose ratio is a trajectory's geometric mean: equal for all of its tokens, as that is."""

    level: Level = "geometric"
    """Weights per token, per trajectory, or the geometric mean over the trajectory."""


class CriterionSettings(Settings):
    """One measure of the mismatch between policy and engines, per token or trajectory, and its bounds."""

    measure: Literal["ratio", "k2", "k3"] = "ratio"
    """The ratio w = old / behaviour, or an estimate of their divergence in nats: log(w)^2 / 2, or w - log w - 1."""
    level: RejectionLevel = "off"
    """Unit that is compared with the bounds and rejected: a token, or a whole trajectory by its tokens' product (k2,
    k3: sum; both `sequence`), their geometric mean (k2, k3: `mean`) or the worst of them (`max`)."""
    low: float = Field(default=0.5, ge=0)
    """Minimum ratio to keep; k2 and k3 have no lower bound."""
    high: float = Field(default=2.0, gt=0)
    """Maximum ratio, or maximum divergence, to keep; required for k2 and k3 (verl's presets: 0.01 for a mean of k3)."""

    @model_validator(mode="after")
    def _possible(self) -> CriterionSettings:
        default = CriterionSettings.model_fields
        given = [name for name in ("measure", "low", "high") if getattr(self, name) != default[name].default]
        if self.level == "off":  # compare values, not which were set: a file written by `foray init` sets all
            if given:
                raise ValueError(
                    f"rejection.{given[0]} has no effect at rejection.level off: set rejection.level, e.g. token"
                )
            return self
        if self.measure == "ratio":
            require_order("rejection", self.low, self.high)
            if self.level == "mean":
                raise ValueError("rejection.level mean needs measure k2 or k3; for ratios use geometric")
            return self
        if self.level == "geometric":
            raise ValueError(f"rejection.level geometric is for ratios; for {self.measure} use mean")
        if "low" in given:
            raise ValueError(f"rejection.low is for ratios: {self.measure} has no lower bound")
        if "high" not in self.model_fields_set:
            raise ValueError(f"rejection.measure {self.measure} needs rejection.high, a divergence in nats")
        return self


class RejectionSettings(CriterionSettings):
    """Tokens rejected from the loss because the mismatch between policy and engines is too large.

    The loss keeps the denominators of the whole batch: rejection does not raise the learning rate.
    """

    also: tuple[CriterionSettings, ...] = ()
    """Further criteria; tokens that fail any of them are rejected."""
    second_moment: float = Field(default=0.0, ge=0)
    """Reject the tokens with the largest log(w)^2 until the mean of the rest is below this, over the batch (M2PO, arXiv
    2510.01161: 0.04; AReaL's `m2_threshold`). Finding the bound on log(w)^2 before the first update takes a forward
    pass of the policy over the batch. 0: off."""
    veto: float = Field(default=0.0, ge=0)
    """Reject trajectories with any token below this ratio; 0: off."""
    off_policy: float = Field(default=0.0, ge=0)
    """Reject a trajectory with a negative advantage if it has become less likely than this since it was sampled, in
    nats per token: a mistake that the policy no longer makes (DeepSeek-V3.2, arXiv 2512.02556). 0: off."""

    @model_validator(mode="after")
    def _all_reject(self) -> RejectionSettings:
        if any(criterion.level == "off" for criterion in self.also):
            raise ValueError("a criterion in rejection.also needs a level, e.g. level: token")
        return self


class KlSettings(Settings):
    """Divergence from the reference (`learner.reference`)."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence; 0: off, no reference model needed."""
    type: KlType = "k3"
    """Estimator from the sampled token (docs/algorithms.md lists their gradients), or the divergence over
    the `top` likeliest tokens with an exact tail (reverse: KL(policy || reference), forward: KL(reference ||
    policy))."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss, or subtracted from the rewards of tokens before advantages are computed."""
    top: int = Field(default=32, ge=0)
    """reverse and forward: number of tokens summed exactly; the rest is estimated from the sampled token."""
    importance: bool = False
    """Weight the estimate by policy / old, at most 10: the old policy sampled the tokens (reverse, forward: tail
    only)."""
    target: float = Field(default=0.0, ge=0)
    """Target divergence of an adaptive coefficient (Ziegler et al., arXiv 1909.08593); 0: fixed coefficient."""
    horizon: int = Field(default=10_000, ge=1)
    """Horizon of the adaptive coefficient, in trajectories."""

    @model_validator(mode="after")
    def _consistent(self) -> KlSettings:
        if self.place == "reward" and self.type not in ("k1", "k2", "k3", "abs"):
            raise ValueError(f"kl.type {self.type} has no value per token, so it cannot be used with kl.place reward")
        if self.target and self.place == "loss":
            raise ValueError("kl.target (an adaptive coefficient) needs kl.place reward")
        return self


class RewardKlSettings(KlSettings):
    """The divergence subtracted from the rewards, as in PPO and REINFORCE++."""

    type: KlType = "k1"
    place: Literal["loss", "reward"] = "reward"


class TopKlSettings(KlSettings):
    """The divergence over the likeliest tokens, as in EMA-PG."""

    coefficient: float = Field(default=1e-3, ge=0)
    type: KlType = "reverse"
    importance: bool = True


class DistillKlSettings(KlSettings):
    """The divergence as the whole objective. k1+ has the gradient of prime-rl's `ref_kl`: log(policy / reference) as a
    loss per token; `reverse` and `forward` also use the likeliest tokens.
    """

    coefficient: float = Field(default=1.0, ge=0)
    type: KlType = "k1+"
    importance: bool = True


NOISE = 0.02
"""Nats per token; below it a fall from the engines' log-probs may be rounding (measured: docs/algorithms.md)."""


class PreserveSettings(Settings):
    """Penalty on log-probs that fall where they should rise: coefficient * max(0, log(old / policy)) of tokens with a
    positive advantage, beside the surrogate, clipped and rejected tokens included (LLDS, arXiv 2512.04220; the search
    agents' SAPO, arXiv 2603.10069). docs/algorithms.md has both as values.
    """

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the penalty; 0: off. LLDS: 0.2 (0.3 for Qwen2.5-7B-Instruct); SAPO of search agents: 0.1."""
    gate: Literal["token", "turn", "trajectory"] = "turn"
    """Unit that must have become less likely, in its mean over tokens, for its fallen tokens to be penalised: a token
    (SAPO), a turn (LLDS-A) or a trajectory (LLDS-R)."""
    threshold: float | None = Field(default=None, ge=0)
    """Fall of the unit in nats per token up to which nothing is penalised; SAPO: -log(tau). Default: 0 with
    old_logprobs recompute, otherwise 0.02, because the log-probs of engines differ by rounding."""
    positive_only: bool = True
    """False: tokens with an advantage of 0 too, as LLDS has it; then groups that are all wrong are preserved too."""
    answer_weight: Annotated[float, Field(ge=0, le=1)] | Literal["searches"] = 1.0
    """Weight of the penalty in the last turn of an answered trajectory; 0: none. searches: min(1, mean searches of the
    batch's trajectories / 2), as LLDS-MA has it, for policies that stop after one search."""


class PolicySettings(Settings):
    """Settings that all algorithms share."""

    token_level_rewards: ClassVar[bool] = False
    """Whether advantages are computed per token, from the rewards of tokens."""

    type: str = ""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped at 1 + clip_high; more than clip_low lets rare tokens grow (DAPO, arXiv 2503.14476)."""
    dual_clip: float = Field(default=3.0, ge=0)
    """Dual clip: bound c > 1 on the clipped loss of tokens with a negative advantage, c * |A| (arXiv 1912.09729; 3 in
    verl); 0: off. Without it a single token with a large mismatch can dominate the gradient."""
    old_logprobs: Proximal = "behaviour"
    """Proximal policy: `behaviour`, the engines' log-probs; `recompute`, the learner's before the update (decoupled
    PPO, arXiv 2505.24298); or an interpolation by the token's lag, without the extra forward pass."""
    correction: CorrectionSettings = CorrectionSettings()
    """Importance weights, if old_logprobs is not behaviour."""
    rejection: RejectionSettings = RejectionSettings()
    """Tokens rejected from the loss."""
    epochs: int = Field(default=1, ge=1, le=16)
    """Passes over each batch."""
    minibatches: int = Field(default=1, ge=1)
    """Minibatches per batch, each with its own optimiser update in every pass."""
    kl: KlSettings = KlSettings()
    """Divergence from a reference."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    drift_coefficient: float = Field(default=0.0, ge=0)
    """Weight of log(policy / old)^2 of every token, including clipped and rejected ones (prime-rl's `kl_tau`: 0.001;
    with `reinforce` and no correction it is verl's DRO at half its beta). With old_logprobs recompute it starts with
    the second update of a batch: in the first one the policy equals `old`, so value and gradient are 0."""
    preserve: PreserveSettings = PreserveSettings()
    """Penalty on falling log-probs of good trajectories."""
    aggregation: Aggregation = "token_mean"
    """Aggregation of token losses; every denominator is that of the whole batch of the update."""
    aggregation_length: int = Field(default=0, ge=0)
    """seq_mean_token_sum(_norm): constant divisor of the sum (Dr. GRPO, arXiv 2503.20783); 0: no division."""
    reward_scale: Literal["none", "batch", "running"] = "none"
    """Divide the rewards of tokens by the deviation over the batch's trajectories, or over all seen so far, without
    centring. For advantages of tokens (ppo, reinforce_pp); group algorithms normalise within the group."""
    whiten: bool = False
    """Whiten the advantages of the batch's tokens: mean 0 and deviation 1 over all ranks."""
    filter: bool = False
    """Replace groups whose trajectories all have the same reward (DAPO's dynamic sampling)."""

    @property
    def group_baseline(self) -> bool:
        """Return whether a trajectory is compared only with its group, so that a group of one has advantage 0."""
        return False

    @model_validator(mode="after")
    def _consistent(self) -> PolicySettings:
        if 0 < self.dual_clip <= 1:
            raise ValueError("dual_clip must be above 1, or 0 for none")
        if self.kl.place == "reward" and not self.token_level_rewards:
            raise ValueError(
                "kl.place reward needs advantages of tokens: use algorithm ppo or reinforce_pp, or kl.place loss"
            )
        if self.reward_scale != "none" and not self.token_level_rewards:
            raise ValueError("reward_scale needs advantages of tokens: use algorithm ppo or reinforce_pp")
        if self.aggregation == "seq_mean_token_sum_norm" and not self.aggregation_length:
            raise ValueError("aggregation seq_mean_token_sum_norm needs an aggregation_length")
        if self.correction.normalize and self.old_logprobs == "interpolate":
            raise ValueError("correction.normalize needs old_logprobs recompute")
        if self.rejection.second_moment and self.old_logprobs == "interpolate":
            raise ValueError("rejection.second_moment needs old_logprobs recompute")
        if self.preserve.coefficient and self.old_logprobs == "recompute" and self.minibatches * self.epochs == 1:
            raise ValueError(
                "preserve has no effect with old_logprobs recompute and a single update per batch: the policy equals "
                "old, so value and gradient are 0. Set minibatches or epochs above 1, or old_logprobs behaviour"
            )
        return self


class GroupSettings(PolicySettings):
    """Advantage: the reward minus its group's mean (GRPO, arXiv 2402.03300)."""

    estimator: Literal["grpo", "rloo", "opo", "max_rl", "pass_at_k"] = "grpo"
    """grpo: reward minus the group's mean; rloo: minus the others' mean; opo: minus the length-weighted mean (arXiv
    2505.23585); max_rl: relative to the mean; pass_at_k: only the best of the group, minus the second best (arXiv
    2503.19595). The fields below apply to grpo and, except for batch, to pass_at_k."""
    turns: Literal["off", "turn", "group", "calibrated"] = "off"
    """Use rewards per turn (process supervision of GRPO, arXiv 2402.03300, section 4.1.3) instead of their sum:
    compared with the same turn of the siblings, or with all their turns. A turn also counts later rewards. calibrated:
    the trajectory's advantage, in the turns of a wrong one less negative by the share of passages that the best
    siblings found too, and balanced between the last turns of a group (CalibAdv, arXiv 2604.18235)."""
    turn_gamma: float = Field(default=1.0, gt=0, le=1)
    """turns turn and group: discount per turn."""
    turn_right: float = 0.7
    """turns calibrated: minimum reward of the best trajectories that show what to find (CalibAdv: 0.7 of F1)."""
    std: Literal["group", "batch", "none"] = "group"
    """Divisor of the difference: the group's standard deviation, the batch's, or none (Dr. GRPO)."""
    parts: dict[str, float] = Field(default_factory=dict, max_length=64)
    """Parts of the reward by name, each with its weight: each part is normalised in its group separately, and the
    advantages are summed (GDPO, arXiv 2601.05242; TRL's `normalize_then_sum`), so that a part with a small spread keeps
    its influence. Empty: the whole reward."""
    normalize_batch: bool = False
    """Normalise the advantages of trajectories to mean 0 and deviation 1 over the batch, as GDPO and TRL do
    (`std_ddof`, `epsilon`); verl's GDPO does this over tokens: `whiten`."""

    @model_validator(mode="after")
    def _parts_are_of_trajectories(self) -> GroupSettings:
        rewarded = self.turns in ("turn", "group")
        if self.parts and rewarded:
            raise ValueError("parts apply to a trajectory's reward and cannot be combined with turns")
        if self.parts and not any(self.parts.values()):
            raise ValueError("all weights in parts are 0, so every advantage would be 0: set one above 0")
        if self.normalize_batch and rewarded:
            raise ValueError("normalize_batch cannot be combined with turns: use whiten")
        if rewarded and (self.estimator, self.std) != ("grpo", "group"):
            raise ValueError("turns needs estimator grpo and std group")
        return self

    @property
    def group_baseline(self) -> bool:
        """Return whether a group of one has advantage 0; turns: group also compares the turns of one trajectory."""
        return self.turns != "group"
