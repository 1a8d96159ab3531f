"""What all algorithms share: corrections around a surrogate, the divergence from a reference, the entropy bonus.

    loss = sum_i weight_i * (keep_i * correction_i * surrogate_i + coefficient * kl_i - entropy_coefficient * entropy_i
                             + drift_coefficient * log(policy_i / old_i)^2 + preserve.coefficient * preserved_i)

An algorithm consists of a surrogate (default: PPO's clip) and advantages. `compute_advantages` subtracts the
divergence from the rewards, and computes advantages of tokens, where an algorithm uses them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.advantages.turns import Turns
from learner.algorithms.advantages.whitening import RunningMoments, whiten
from learner.algorithms.base import AllReduce, LossOutput, Requirements, TokenAdvantages, TokenInputs, TokenScores
from learner.algorithms.correction import Corrected, Correction
from learner.algorithms.kl.controller import AdaptiveKl, FixedKl, KlController
from learner.algorithms.kl.estimators import kl_estimate, log_ratio, penalised
from learner.algorithms.kl.exact import topk_forward_kl, topk_reverse_kl
from learner.algorithms.losses.policy import (
    Surrogate,
    clipped_surrogate,
    entropy_sum,
    proximal_interpolated,
    weighted_sum,
)
from learner.algorithms.losses.segments import segment_sum
from learner.algorithms.losses.trust_region import preserve
from learner.config.policy import NOISE, KlSettings, PolicySettings

AGES = 4
"""Losses are reported by the tokens' lag, from 0 to AGES - 1; older tokens count with the last."""
TURNS = 4
"""Log-probs are reported by turn, from 0 to TURNS - 1; later turns count with the last."""
TAIL = 2.0
"""A ratio above this, or below its inverse, is in a tail."""

Scalars = dict[str, torch.Tensor]
Ratios = dict[str, tuple[torch.Tensor, torch.Tensor]]


def report(
    inputs: TokenInputs, surrogate: Surrogate, corrected: Corrected, values: torch.Tensor
) -> tuple[Scalars, Scalars, Ratios]:
    """(sums, maxima, ratios) of `LossOutput`.

    clip_fraction, clip_low, clip_high, clip_dual  share of tokens whose ratio was clipped, and at which bound
    ratio_mean, ratio_square, ratio_max            of the surrogate's ratio; the squares make the effective sample size
    entropy                                        nats per token
    kl_behaviour                                   k3 of the engines' policy against the learner's, at most 10 per token
    logprob_gap, logprob_gap_max                   |log-prob of the learner - that of the engine|
    rejected, weight_mean                          share of rejected tokens; mean importance weight
    logprob_right, logprob_wrong                   mean log-prob of tokens in trajectories whose mean advantage is above
                                                   and below 0: the first should not fall; `_turn_N`: of its turns
    entropy_search, entropy_answer                 entropy in the last turn of answered trajectories, and in the others
    ratio_low, ratio_high                          share of tokens whose ratio is below 1 / TAIL and above TAIL
    loss_lag_0 ...                                 mean loss of tokens by their lag
    """
    mask, logprobs = inputs.mask, inputs.logprobs.detach()
    # Mismatch between trainer and engines: staleness, and the numerics of two programs.
    gap = log_ratio(logprobs, inputs.behaviour, mask).abs()
    sums = {
        "clip_fraction": surrogate.clipped.sum(),
        "clip_low": surrogate.clipped_low.sum(),
        "clip_high": surrogate.clipped_high.sum(),
        "clip_dual": surrogate.clipped_dual.sum(),
        "ratio_mean": surrogate.ratio.sum(),
        "ratio_square": surrogate.ratio.square().sum(),
        "entropy": torch.where(mask, inputs.entropy.detach(), 0.0).sum(),
        "kl_behaviour": kl_estimate(inputs.behaviour, logprobs, mask, "k3").sum(),
        "logprob_gap": gap.sum(),
        "ratio_low": (mask & (surrogate.ratio < 1 / TAIL)).sum(),
        "ratio_high": (surrogate.ratio > TAIL).sum(),
        "rejected": (mask & ~corrected.kept).sum(),
        "weight_mean": torch.where(mask, corrected.weight, 0.0).sum(),
    }
    maxima = {"ratio_max": _largest(surrogate.ratio), "logprob_gap_max": _largest(gap)}
    gain, answers = segment_sum(inputs.advantages, inputs.trajectory, mask), mask & (inputs.answer >= 0)
    right, entropy = mask & (gain > 0), inputs.entropy.detach()
    ratios = {
        "logprob_right": mean_where(logprobs, right),
        "logprob_wrong": mean_where(logprobs, mask & (gain < 0)),
        **by_turn("logprob_right", logprobs, inputs.turn, right),
        "entropy_answer": mean_where(entropy, answers),
        "entropy_search": mean_where(entropy, mask & ~answers),
    }
    ages = inputs.lags.clamp(0, AGES - 1)
    for age in range(AGES):
        ratios[f"loss_lag_{age}"] = mean_where(values.detach(), mask & (ages == age))
    return sums, maxima, ratios


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the maximum, 0 without tokens: both maxima are of non-negative numbers."""
    return values.max() if len(values) else values.new_zeros(())


def mean_where(values: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numerator and the denominator of the mean of `values` [N] where `where` [N] is True."""
    return torch.where(where, values, 0.0).sum(), where.sum()


def by_turn(name: str, values: torch.Tensor, turn: torch.Tensor, where: torch.Tensor) -> Ratios:
    """Return `mean_where` of each turn from 0 to TURNS - 1, as `name_turn_N`; later turns count with the last."""
    numbers = turn.clamp(0, TURNS - 1)
    return {f"{name}_turn_{k}": mean_where(values, where & (numbers == k)) for k in range(TURNS)}


class PolicyAlgorithm:
    """Base of every algorithm (see the module). Subclasses define `advantages`, and override the rest as needed."""

    uses_critic = False
    bootstraps = False
    distills = False
    """Whether the surrogate is the divergence; then there is no separate penalty."""

    def __init__(self, settings: PolicySettings) -> None:
        self.policy_settings = settings
        self.aggregation = settings.aggregation
        self.aggregation_length = settings.aggregation_length
        self.minibatches, self.epochs = settings.minibatches, settings.epochs
        self.filters = settings.filter
        self._correction = Correction(settings)
        self._kl = kl_controller(settings.kl)
        self._moments = self._new_moments = RunningMoments()
        self._divergence: tuple[float, int] | None = None
        """Mean of the last batch and its trajectories, if the controller is to be updated with it."""

    @property
    def requirements(self) -> Requirements:
        """Return what must be computed before the loss."""
        s = self.policy_settings
        kl = s.kl
        in_reward = kl.place == "reward" and kl.coefficient > 0
        return Requirements(
            reference=kl.coefficient > 0,
            values=self.uses_critic,
            entropy_gradient=s.entropy_coefficient != 0,
            old=s.old_logprobs == "recompute",
            old_for_advantages=in_reward or self._correction.needs_old_for_advantages,
            top=kl.top if kl.coefficient > 0 and kl.type in ("reverse", "forward") else 0,
            top_of="reference" if kl.type == "forward" else "policy",
        )

    # --- before packing ---

    def turn_advantages(self, outcomes: Outcomes, turns: Turns) -> npt.NDArray[np.float64] | None:
        """Return [n, K] float64, one per turn, or None if advantages are per trajectory."""
        return None

    def reward_scale(self, outcomes: Outcomes) -> float:
        """Return the factor on the rewards of tokens, 1 by default. The running moments include the batch."""
        kind = self.policy_settings.reward_scale
        if kind == "none":
            return 1.0
        moments = copy.copy(self._moments) if kind == "running" else RunningMoments()
        moments.update(outcomes.rewards[outcomes.valid])
        if kind == "running":
            self._new_moments = moments
        return float(moments.normalize(np.ones(1), centre=False)[0])

    def after_update(self) -> None:
        """Keep the moments with the last batch, and update the KL coefficient with its divergence."""
        self._moments = self._new_moments
        if self._divergence is not None:
            self._kl.update(*self._divergence)
            self._divergence = None

    # --- before the first update ---

    def compute_advantages(
        self, scores: Sequence[TokenScores], all_reduce: AllReduce
    ) -> tuple[list[TokenAdvantages], dict[str, float]]:
        """Return advantages of tokens over all ranks: `token_advantages`, whitened if so configured."""
        self._correction.prepare(scores, all_reduce)
        rewards, facts = self._rewards(scores, all_reduce)
        estimates = self.token_advantages(scores, rewards)
        if self.policy_settings.whiten:
            estimates = _whitened(estimates, scores, all_reduce)
        return estimates, facts

    def token_advantages(self, scores: Sequence[TokenScores], rewards: Sequence[torch.Tensor]) -> list[TokenAdvantages]:
        """Return the advantages of each micro-batch's tokens; here those of their trajectories. `rewards`: reward of
        each token, minus the divergence if `kl.place` is reward.
        """
        return [TokenAdvantages(s.advantages) for s in scores]

    def _rewards(
        self, scores: Sequence[TokenScores], all_reduce: AllReduce
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        kl = self.policy_settings.kl
        if kl.place == "loss" or not kl.coefficient:
            return [s.rewards for s in scores], {}
        rewards, sums = [], torch.zeros(3, dtype=torch.float64)
        for s in scores:
            assert s.old is not None and s.reference is not None
            divergence = kl_estimate(s.old, s.reference, s.mask, kl.type)  # type: ignore[arg-type]  # see KlSettings
            rewards.append(penalised(s.rewards, divergence, self._kl.coefficient, s.mask))
            count = int((torch.unique(s.trajectory[s.mask]) >= 0).sum())
            sums += torch.tensor([float(divergence.double().sum()), float(s.mask.sum()), count], dtype=torch.float64)
        divergence, tokens, trajectories = all_reduce(sums).tolist()
        mean = divergence / max(tokens, 1.0)
        facts = {"kl_reference": mean, "kl_coefficient": self._kl.coefficient}
        # not finite: the update is refused; keep the coefficient
        self._divergence = (mean, int(trajectories)) if math.isfinite(mean) else None
        return rewards, facts

    # --- in every update ---

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the loss of tokens before corrections: PPO's clip around `old`."""
        s = self.policy_settings
        return clipped_surrogate(
            inputs.logprobs,
            old,
            inputs.advantages,
            inputs.mask,
            low=s.clip_low,
            high=s.clip_high,
            dual=s.dual_clip or None,
        )

    def loss(self, inputs: TokenInputs) -> LossOutput:
        """Return the loss of one micro-batch (see the module)."""
        s, mask = self.policy_settings, inputs.mask
        old = inputs.old
        if s.old_logprobs == "interpolate":
            old = proximal_interpolated(inputs.logprobs, inputs.behaviour, inputs.lags, mask)
        surrogate = self.surrogate(inputs, old)
        corrected = self._correction.of(inputs, old)
        values = surrogate.loss * corrected.weight
        total = weighted_sum(values, inputs.token_weights, mask)
        sums, maxima, ratios = report(inputs, surrogate, corrected, values)
        if s.entropy_coefficient:
            total = total - s.entropy_coefficient * entropy_sum(inputs.entropy, inputs.token_weights, mask)
        if s.drift_coefficient:
            drift = log_ratio(inputs.logprobs, old.detach(), mask).square()
            total = total + s.drift_coefficient * weighted_sum(drift, inputs.token_weights, mask)
        if s.preserve.coefficient:
            penalty = self.preserved(inputs, old)
            total = total + s.preserve.coefficient * weighted_sum(penalty, inputs.token_weights, mask)
            sums |= {"preserve": penalty.detach().sum(), "preserve_share": (penalty.detach() > 0).sum()}
        if inputs.reference is not None and s.kl.place == "loss":
            divergence = self.divergence(inputs, old)
            if not self.distills:
                total = total + s.kl.coefficient * weighted_sum(divergence, inputs.token_weights, mask)
            sums["kl_reference"] = divergence.detach().sum()
        return LossOutput(total, sums, maxima, ratios)

    def preserved(self, inputs: TokenInputs, old: torch.Tensor) -> torch.Tensor:
        """Return [N]: the penalty on fallen log-probs, as set by `preserve`."""
        p = self.policy_settings.preserve
        default = 0.0 if self.policy_settings.old_logprobs == "recompute" else NOISE
        unit = {
            "token": torch.arange(len(inputs.turn), device=inputs.turn.device),
            "turn": inputs.trajectory * (_largest(inputs.turn) + 1) + inputs.turn,
            "trajectory": inputs.trajectory,
        }[p.gate]
        penalty = preserve(
            inputs.logprobs,
            old,
            inputs.advantages,
            unit,
            inputs.mask,
            threshold=default if p.threshold is None else p.threshold,
            positive_only=p.positive_only,
        )
        last = (inputs.answer / 2).clamp(max=1) if p.answer_weight == "searches" else p.answer_weight
        return torch.where(inputs.answer >= 0, penalty * last, penalty)

    def divergence(self, inputs: TokenInputs, old: torch.Tensor) -> torch.Tensor:
        """Return [N]: the divergence from the reference, as set by `kl`; needs `inputs.reference`."""
        kl, reference = self.policy_settings.kl, inputs.reference
        assert reference is not None
        importance = old if kl.importance else None
        if kl.type != "reverse" and kl.type != "forward":
            return kl_estimate(inputs.logprobs, reference, inputs.mask, kl.type, importance)
        top = inputs.top
        estimate = topk_reverse_kl if kl.type == "reverse" else topk_forward_kl
        empty = inputs.logprobs.new_zeros((len(inputs.logprobs), 0))
        return estimate(
            empty if top is None else top.policy,
            empty if top is None else top.reference,
            inputs.logprobs,
            reference,
            torch.zeros_like(inputs.mask) if top is None else top.inside,
            inputs.mask,
            importance,
        )

    def state(self) -> dict[str, Any]:
        """Return the adaptive coefficient, and the moments of rewards."""
        return {"kl": self._kl.state(), "moments": self._moments.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._kl.load(state["kl"])
        self._moments.load(state["moments"])
        self._new_moments, self._divergence = self._moments, None


def kl_controller(settings: KlSettings) -> KlController:
    """Return an adaptive controller if there is a target, else a fixed one."""
    if settings.target:
        return AdaptiveKl(settings.coefficient, target=settings.target, horizon=settings.horizon)
    return FixedKl(settings.coefficient)


def _whitened(
    estimates: Sequence[TokenAdvantages], scores: Sequence[TokenScores], all_reduce: AllReduce
) -> list[TokenAdvantages]:
    """Return a copy with advantages of mean 0 and deviation 1 over all tokens of all ranks."""
    sizes = [len(j.advantages) for j in estimates]
    together = whiten(
        torch.cat([j.advantages for j in estimates]), torch.cat([s.mask for s in scores]), all_reduce=all_reduce
    )
    return [TokenAdvantages(part, j.returns) for part, j in zip(torch.split(together, sizes), estimates, strict=True)]
