"""Change of log-probs over a step: a sample of its trajectories is scored again by the updated policy.

The sample is from the first minibatch, whose log-probs in the first epoch are exactly those of the policy before the
step, by the same program: nothing else has to be computed before. Trajectories with a positive advantage come first.
One forward pass of each rank for a step, over a sixteenth of the tokens and at least one trajectory: as a pass forwards
costs a third of one with gradient, about 2 % of a step's compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.algorithms.base import LossOutput
from learner.algorithms.losses.segments import segment_sum
from learner.algorithms.policy import by_turn, mean_where
from learner.data.batch import IntArray, MicroBatch, RankBatch
from learner.data.packing import place_rows
from learner.trainer.models import Models
from learner.trainer.scoring import ScoredTokens

FALL = 1e-4
"""Nats per token; a smaller fall is none: two layouts of the same rows differ by about 1e-6 in float32."""


@dataclass(frozen=True)
class _Sampled:
    """A trajectory of a micro-batch: its number, its inputs [L], which of the micro-batch's tokens are its own [n], and
    the inputs that predict them [n]."""

    number: int
    tokens: ScoredTokens
    ids: IntArray
    own: IntArray
    index: IntArray


def trajectories(micro_batch: MicroBatch, tokens: ScoredTokens) -> list[_Sampled]:
    """Return the trajectories of a micro-batch in any layout, each with its prompt; of several sequences, each alone.

    Positions that do not continue begin a block: at 0 a document, otherwise the rest of a trajectory that shares the
    prompt of its document.
    """
    document = (micro_batch.document_ids + np.arange(len(micro_batch.ids))[:, None] * micro_batch.ids.size).ravel()
    positions, ids = micro_batch.positions.ravel(), micro_batch.ids.ravel()
    starts = np.flatnonzero(np.diff(document, prepend=-9) | (np.diff(positions, prepend=-9) != 1))
    found = []
    for number in np.unique(micro_batch.sequence):
        own = np.flatnonzero(micro_batch.sequence == number)
        end = int(micro_batch.index[own].max()) + 1
        start = int(starts[np.searchsorted(starts, end) - 1])
        first = int(np.flatnonzero(document == document[start])[0])
        slots = np.r_[first : first + positions[start], start:end]
        found.append(_Sampled(int(number), tokens, ids[slots], own, np.searchsorted(slots, micro_batch.index[own])))
    return found


def choose(known: Sequence[_Sampled], budget: int, turn: int, *, packed: bool) -> list[_Sampled]:
    """Return the trajectories to score again: those with a positive advantage first, beginning elsewhere in each step
    (`turn`), as many as fit into `budget` tokens with padding, at least one.
    """
    known = sorted(known, key=lambda s: s.number)  # not by their place in rows and micro-batches
    good = [float(s.tokens.advantages[torch.from_numpy(s.own)].sum()) > 0 for s in known]
    order = sorted(range(len(known)), key=lambda i: (not good[i], (i + turn) % len(known)))
    chosen: list[_Sampled] = []
    total = widest = 0
    for i in order:
        size = len(known[i].ids)
        total, widest = total + size, max(widest, size)
        if chosen and (total if packed else widest * (len(chosen) + 1)) > budget:
            break
        chosen.append(known[i])
    return chosen


@torch.no_grad()
def rescore(rank_batch: RankBatch, batch: Sequence[ScoredTokens], models: Models) -> LossOutput:
    """Return the change of log-probs over the step that has just updated the policy, as metrics; collective.

    logprob_change     mean over the tokens of the sampled trajectories with a positive advantage; `_turn_N`: of a turn
    fell_trajectories  share of those trajectories whose log-prob fell by more than FALL nats per token
    fell_turns         share of their turns
    """
    first = [tokens for tokens in batch if tokens.minibatch == 0]
    known = [s for m, tokens in zip(rank_batch.minibatches[0], first, strict=True) for s in trajectories(m, tokens)]
    budget = int(models.settings.rescored_share * sum(tokens.ids.numel() for tokens in batch))
    packed = models.settings.batch.row_tokens > 0
    limit = max(tokens.ids.numel() for tokens in first)
    chosen = choose(known, min(budget, limit), models.policy.updates, packed=packed)
    placed = place_rows([[s.ids for s in chosen]] if packed else [[s.ids] for s in chosen])
    index = np.concatenate([start + s.index for start, s in zip(placed.starts, chosen, strict=True)])

    def of(name: str) -> torch.Tensor:
        each = [getattr(s.tokens, name)[torch.from_numpy(s.own).to(models.device)] for s in chosen]
        return torch.cat(each)

    ids, positions, documents, at = (
        torch.from_numpy(x).to(models.device) for x in (placed.ids, placed.positions, placed.document_ids, index)
    )
    inputs = (ids, positions, documents if packed else None, at, of("targets"), batch[0].temperature)
    now = models.policy.forward(*inputs, False, 0, None).logprobs
    return LossOutput(
        now.new_zeros(()), ratios=changes(now - of("before"), *map(of, ("advantages", "sequence", "turn", "mask")))
    )


def changes(
    change: torch.Tensor, advantages: torch.Tensor, trajectory: torch.Tensor, turn: torch.Tensor, mask: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the metrics of `rescore` from the change [N] of each token's log-prob, as (numerator, denominator)."""
    good = mask & (segment_sum(advantages, trajectory, mask) > 0)
    ratios = {"logprob_change": mean_where(change, good), **by_turn("logprob_change", change, turn, good)}
    for name, unit in (("trajectories", trajectory), ("turns", trajectory * (turn.max() + 1) + turn)):
        each = torch.unique(unit[good], return_inverse=True)[1]
        total = change.new_zeros(int(each.max()) + 1 if len(each) else 0).index_add(0, each, change[good] + FALL)
        ratios[f"fell_{name}"] = ((total < 0).sum(), change.new_tensor(len(total)))
    return ratios
