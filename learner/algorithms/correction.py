"""Importance weights and rejection for the mismatch between the proximal policy and the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from learner.algorithms.advantages.gae import to_rows
from learner.algorithms.base import AllReduce, TokenInputs, TokenScores
from learner.algorithms.kl.estimators import log_ratio
from learner.algorithms.losses.off_policy import (
    WeightSums,
    keep_mask,
    masked,
    normalised,
    opsm,
    truncated,
    veto,
    weight_sums,
)
from learner.algorithms.losses.second_moment import second_moment_bound
from learner.config.policy import PolicySettings


class Corrected(NamedTuple):
    """Per token, [N]: the weight on its loss (0 if rejected), and whether it was kept; both constants."""

    weight: torch.Tensor
    kept: torch.Tensor


class Correction:
    """Applies `CorrectionSettings` and `RejectionSettings`."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings.correction
        self._rejection = settings.rejection
        self._weighs = settings.old_logprobs != "behaviour" and settings.correction.mode != "off"
        self._by_policy = settings.old_logprobs == "behaviour"
        self._normalises = self._weighs and self._settings.normalize
        self._sums: WeightSums | None = None
        self._bound: float | None = None

    @property
    def needs_old_for_advantages(self) -> bool:
        """Return whether the weights of the whole batch are needed before any of them is used."""
        return self._normalises or self._rejection.second_moment > 0

    def prepare(self, scores: Sequence[TokenScores], all_reduce: AllReduce) -> None:
        """Compute the batch-wide quantities: sums of the weights, bound on their second moment; collective."""
        if not self.needs_old_for_advantages:
            return
        log_weights = []
        for s in scores:
            assert s.old is not None
            log_weights.append(log_ratio(s.old, s.behaviour, s.mask))
        if self._normalises:
            pieces = []
            for log_weight, s in zip(log_weights, scores, strict=True):
                weight = self._weight(log_weight, s.trajectory, s.mask)
                pieces.append(torch.stack(weight_sums(weight, s.trajectory, s.mask, level=self._settings.level)))
            self._sums = WeightSums(*all_reduce(torch.stack(pieces).sum(0)))
        if self._rejection.second_moment:
            squares = [x[s.mask].double().square() for x, s in zip(log_weights, scores, strict=True)]
            self._bound = second_moment_bound(squares, self._rejection.second_moment, all_reduce)

    def of(self, inputs: TokenInputs, old: torch.Tensor) -> Corrected:
        """Return weights of one micro-batch's tokens, given the proximal log-probs."""
        mask = inputs.mask
        log_weight = log_ratio(old.detach(), inputs.behaviour, mask)
        weight = torch.ones_like(log_weight)
        if self._weighs:
            weight = self._weight(log_weight, inputs.trajectory, mask)
            if self._sums is not None:
                weight = normalised(weight, mask, self._sums)
        # Where the engines' policy is the proximal one, the only policy to compare it with is the one being trained.
        compared = log_ratio(inputs.logprobs.detach(), inputs.behaviour, mask) if self._by_policy else log_weight
        kept = self._kept(compared, inputs.trajectory, mask)
        delta = self._rejection.off_policy
        if delta:
            logprobs, advantages = inputs.logprobs.detach(), inputs.advantages
            kept = kept & opsm(logprobs, inputs.behaviour, advantages, inputs.trajectory, mask, delta=delta)
        return Corrected(torch.where(kept, weight, 0.0), kept)

    def _weight(self, log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        s = self._settings
        limit = truncated if s.mode == "truncate" else masked
        return limit(log_weight, trajectory, mask, level=s.level, low=s.low, high=s.high)

    def _kept(self, log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        r = self._rejection
        kept = mask
        for c in (r, *r.also):
            if c.level != "off":
                bounds = {"low": c.low, "high": c.high}
                kept = kept & keep_mask(log_weight, trajectory, mask, level=c.level, measure=c.measure, **bounds)
        if self._bound is not None:
            kept = kept & (log_weight.double().square() <= self._bound)
        if r.veto:
            kept = kept & veto(log_weight, trajectory, mask, threshold=r.veto)
        return kept


OnRows = Callable[..., tuple[torch.Tensor, ...]]
"""(mask [B, T], one [B, T] for each flat tensor) -> [B, T] each."""


def over_rows(scores: TokenScores, function: OnRows, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply `function` to the flat tensors [N] as rows and return them flat again. A row is a sequence, so nothing
    crosses from one to another, however they are packed. Masked tokens (dummies) give 0.
    """
    rows = to_rows(scores.trajectory)
    mask = rows.pad(scores.mask) & rows.mask
    return tuple(rows.flat(x) for x in function(mask, *(rows.pad(x) for x in flat)))
