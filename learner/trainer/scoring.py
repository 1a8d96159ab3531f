"""Scores of a rank's tokens before its first update, by the policy, the critic and the reference; no gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from learner.algorithms.base import Algorithm, Requirements, TokenScores
from learner.data.batch import MicroBatch, RankBatch
from learner.data.packing import holds_several
from learner.trainer.models import Models


@dataclass
class ScoredTokens:
    """A micro-batch on the device, and the scores of its N trained tokens.

    The first fields as in `MicroBatch`, the last ones as in `TokenScores` and `TokenAdvantages`; None until computed,
    or where not required.

    document_ids   None if no row contains two trajectories
    advantages     from the outcomes, then those of `Algorithm.compute_advantages`
    mask           [N] bool, False in dummies that pad a rank; `num_weighted` are True
    minibatch      number of its update in each epoch, from 0
    top            [N, k] int64, the likeliest tokens at each position (see `Requirements.top_of`)
    reference_top  [N, k] their log-probs by the reference
    logprobs       [N] float32, by the policy in the last epoch, before its update
    before         [N] float32, the same in the first epoch
    """

    ids: torch.Tensor
    positions: torch.Tensor
    document_ids: torch.Tensor | None
    index: torch.Tensor
    targets: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    token_weights: torch.Tensor
    rewards: torch.Tensor
    lags: torch.Tensor
    trajectory: torch.Tensor
    sequence: torch.Tensor
    place: torch.Tensor
    turn: torch.Tensor
    answer: torch.Tensor
    end: torch.Tensor
    mask: torch.Tensor
    num_weighted: int
    minibatch: int
    temperature: float
    old: torch.Tensor | None = None
    values: torch.Tensor | None = None
    last_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    top: torch.Tensor | None = None
    reference_top: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    before: torch.Tensor | None = None

    @classmethod
    def of(cls, micro_batch: MicroBatch, number: int, temperature: float, device: torch.device) -> ScoredTokens:
        """Return the arrays of a micro-batch of minibatch `number` as tensors, without scores."""
        moved: dict[str, Any] = {
            name: torch.from_numpy(getattr(micro_batch, name)).to(device) for name in MicroBatch.__dataclass_fields__
        }
        if not holds_several(micro_batch.document_ids, micro_batch.positions):
            moved["document_ids"] = None
        weighted = int((micro_batch.token_weights > 0).sum())
        mask = moved["token_weights"] > 0
        return cls(**moved, mask=mask, num_weighted=weighted, minibatch=number, temperature=temperature)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return the first arguments of a model's forward pass."""
        return self.ids, self.positions, self.document_ids, self.index

    @property
    def policy_inputs(self) -> tuple[Any, ...]:
        """Return the arguments of a policy's forward pass, up to the entropy gradient."""
        return *self.inputs, self.targets, self.temperature

    @property
    def with_ends(self) -> ScoredTokens:
        """Return a copy whose `index` also has the states after truncated trajectories, behind the N tokens; their
        `targets` are token 0 and are not scored.
        """
        states = torch.unique(self.end[self.end >= 0])
        targets = torch.cat([self.targets, torch.zeros_like(states)])
        return replace(self, index=torch.cat([self.index, states]), targets=targets)

    @property
    def scores(self) -> TokenScores:
        """Return the input of `Algorithm.compute_advantages`."""
        return TokenScores(
            rewards=self.rewards,
            advantages=self.advantages,
            behaviour=self.behaviour,
            old=self.old,
            reference=self.reference,
            values=self.values,
            last_values=self.last_values,
            mask=self.mask,
            trajectory=self.sequence,
            turn=self.turn,
        )

    @property
    def columns(self) -> dict[str, np.ndarray[Any, Any] | None]:
        """Return [n] arrays of the tokens with a weight, for `TokenValues.add`; None before the first loss."""
        columns = {
            "trajectory": self.trajectory,
            "position": self.place,
            "logprob": self.logprobs,
            "reference": self.reference,
            "advantage": self.advantages,
        }
        return {name: None if column is None else column[self.mask].cpu().numpy() for name, column in columns.items()}


@torch.no_grad()
def score(rank_batch: RankBatch, models: Models, algorithm: Algorithm) -> list[ScoredTokens]:
    """Return the micro-batches with the scores that the algorithm needs; collective at ZeRO stage 3.

    One model after the other over the whole batch of the rank, so that unused models can be offloaded.
    """
    batch, needs = on_device(rank_batch, models.device), algorithm.requirements
    if needs_old_scores(needs, models, updates=algorithm.epochs * len(rank_batch.minibatches)):
        for tokens in batch:
            score_by_policy(tokens, models, needs)
    if models.critic is not None:
        for tokens in batch:
            score_by_critic(tokens, models.critic.engine.forward(*tokens.with_ends.inputs))
    if models.reference is not None:
        models.reference.onload()
        for tokens in batch:
            score_by_reference(tokens, models, needs)
        models.reference.offload()
    return batch


def on_device(rank_batch: RankBatch, device: torch.device) -> list[ScoredTokens]:
    """Return the micro-batches of all minibatches, in order."""
    batch = []
    for number, minibatch in enumerate(rank_batch.minibatches):
        for micro_batch in minibatch:
            batch.append(ScoredTokens.of(micro_batch, number, rank_batch.temperature, device))
    return batch


def needs_old_scores(needs: Requirements, models: Models, *, updates: int) -> bool:
    """Return whether the policy has to score the tokens before the first of `updates` updates."""
    # With a single update the proximal policy is the update's own forward pass, detached.
    return (
        (needs.old and updates > 1)
        or needs.old_for_advantages
        or (needs.values and models.critic is None)  # the policy's value head
        or (needs.top > 0 and needs.top_of == "policy")
    )


def score_by_policy(tokens: ScoredTokens, models: Models, needs: Requirements) -> None:
    """Keep the log-probs, the likeliest tokens and a value head's values."""
    with_ends = needs.values and models.critic is None
    n, top = len(tokens.index), needs.top if needs.top_of == "policy" else 0
    scores = models.policy.forward(*(tokens.with_ends if with_ends else tokens).policy_inputs, False, top)
    tokens.old = scores.logprobs[:n]
    tokens.top = None if scores.top is None else scores.top[:n]
    if with_ends:
        score_by_critic(tokens, scores.values)


def score_by_critic(tokens: ScoredTokens, values: torch.Tensor) -> None:
    """Keep the values of the tokens and of the states after truncated trajectories, from those of `with_ends`."""
    which = torch.unique(tokens.end[tokens.end >= 0], return_inverse=True)[1]
    tokens.values, after = values[: len(tokens.index)], values[len(tokens.index) :]
    tokens.last_values = torch.zeros_like(tokens.values).masked_scatter(tokens.end >= 0, after[which])


def score_by_reference(tokens: ScoredTokens, models: Models, needs: Requirements) -> None:
    """Keep the reference's log-probs of the tokens and of the likeliest ones, the policy's or its own."""
    assert models.reference is not None
    top = needs.top if needs.top_of == "reference" else 0
    scores = models.reference.forward(*tokens.policy_inputs, False, top, tokens.top)
    tokens.reference, tokens.reference_top = scores.logprobs, scores.at
    if top:
        tokens.top = scores.top
