"""The interface of algorithms: outcomes in, advantages out; token scores in, a loss out.

outcomes --advantages--> one number per trajectory   (before packing, numpy)
scores   --advantages--> advantages and returns of tokens   (before the first update, over all ranks)
tokens   --loss--------> one number per micro-batch   (in every update)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from learner.data.batch import AdvantageEstimator

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a float64 vector over the ranks; every rank must call it, in the same order."""


@dataclass(frozen=True)
class Requirements:
    """What an algorithm needs computed before its loss.

    reference           log-probs of the reference policy
    values              values of a critic, and the returns that it is trained on
    entropy_gradient    whether the entropy is part of the loss
    old                 whether `TokenInputs.old` is the policy before the first update, not the engines' log-probs
    old_for_advantages  whether `compute_advantages` reads `TokenScores.old`
    top, top_of         log-probs of the `top` likeliest tokens, of the policy before the first update or the reference
    """

    reference: bool = False
    values: bool = False
    entropy_gradient: bool = False
    old: bool = False
    old_for_advantages: bool = False
    top: int = 0
    top_of: Literal["policy", "reference"] = "policy"


@dataclass(frozen=True)
class TokenScores:
    """One micro-batch before the first update: N trained tokens, all tensors [N], float32 unless said otherwise.

    rewards     reward at this token; the outcome is at the last token of each sequence of its trajectory
    advantages  from the outcomes
    behaviour   log-probs when the tokens were sampled
    old         log-probs of the policy before the update, None where not required
    reference   log-probs of the reference, None where not required
    values      of the critic, None without one
    last_values the critic's value of the state after the trajectory's last token, if it was truncated and
                `Algorithm.bootstraps`; 0 elsewhere. None without a critic
    mask        bool, False only in dummies that pad a rank
    trajectory  int64, number of the token's training sequence in the batch; at least 0 in exactly one sequence of each
                trajectory
    turn        int64, number of the token's turn in its trajectory
    """

    rewards: torch.Tensor
    advantages: torch.Tensor
    behaviour: torch.Tensor
    old: torch.Tensor | None
    reference: torch.Tensor | None
    values: torch.Tensor | None
    mask: torch.Tensor
    trajectory: torch.Tensor
    turn: torch.Tensor
    last_values: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of the tokens of one micro-batch, and the returns that the critic is trained on: [N] float32 each."""

    advantages: torch.Tensor
    returns: torch.Tensor | None = None


@dataclass(frozen=True)
class TopTokens:
    """Log-probs of the k likeliest tokens at each trained position (whose likeliest: `Requirements.top_of`).

    policy     [N, k] log-probs of the policy, with gradient
    reference  [N, k] log-probs of the reference
    inside     [N] bool, whether the trained token is among them
    """

    policy: torch.Tensor
    reference: torch.Tensor
    inside: torch.Tensor


@dataclass(frozen=True)
class TokenInputs:
    """What a loss sees of one micro-batch: N trained tokens, all tensors [N], float32 unless said otherwise.

    logprobs      of the policy being trained, with gradient
    entropy       of its distributions, with gradient where `Requirements.entropy_gradient`
    behaviour     log-probs when the tokens were sampled
    old           log-probs of the proximal policy (see `Requirements.old`)
    reference     log-probs of the reference, None where the algorithm does not need one
    advantages    as `compute_advantages` returned them
    token_weights share of each token in the loss of the whole batch (`learner.data.packing`)
    mask          bool, False only in dummies that pad a rank
    trajectory    int64, number of the token's sequence in the batch: "per trajectory" in a loss is per sequence
    lags          int64, steps between the version that sampled the token and the one being trained
    turn          int64, number of the token's turn in its trajectory
    answer        as `learner.data.batch.MicroBatch.answer`
    top           set if `Requirements.top`
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    behaviour: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor | None
    advantages: torch.Tensor
    token_weights: torch.Tensor
    mask: torch.Tensor
    trajectory: torch.Tensor
    lags: torch.Tensor
    turn: torch.Tensor
    answer: torch.Tensor
    top: TopTokens | None = None


@dataclass(frozen=True)
class LossOutput:
    """The micro-batch's share in the loss of the batch, and its metrics.

    loss    scalar with gradient; the shares of all micro-batches add up to the loss of the batch
    sums    scalars without gradient, added up over the batch and divided by its number of trained tokens
    maxima  scalars without gradient, the largest in the batch is reported
    ratios  (numerator, denominator), both added up over the batch; omitted if the denominator is 0
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    ratios: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Algorithm(AdvantageEstimator, Protocol):
    """One RL algorithm.

    aggregation, aggregation_length  how token losses become one number (`learner.data.packing`)
    minibatches                      parts of a batch, each with its own update
    epochs                           passes over the batch
    filters                          whether groups without a learning signal are replaced by others
    bootstraps                       whether `compute_advantages` reads `TokenScores.last_values`
    """

    epochs: int
    filters: bool

    @property
    def requirements(self) -> Requirements:
        """Return what the learner computes before `compute_advantages` and `loss`; the same for the whole run."""

    def after_update(self) -> None:
        """Keep what the last batch adds to `state`: called after its update, so that a skipped batch adds nothing."""

    def compute_advantages(
        self, scores: Sequence[TokenScores], all_reduce: AllReduce
    ) -> tuple[list[TokenAdvantages], dict[str, float]]:
        """Return advantages (and returns) of every token of this rank, and values for the metrics; collective."""

    def loss(self, inputs: TokenInputs) -> LossOutput:
        """Return the loss of one micro-batch; no token of it may depend on another micro-batch."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs (controllers), JSON-serialisable; the same on every rank."""

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
