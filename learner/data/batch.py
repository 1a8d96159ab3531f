"""Trajectory groups to packed micro-batches (pure numpy): which tokens are trained, with which weight, in which row.

A token is trained if the policy sampled it, its version is part of the current lineage and at most `max_lag` steps old,
and its trajectory is valid (no infrastructure failure ended it). Everything that spans the batch (advantages,
denominators) is computed here once, so that micro-batches are independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.advantages.turns import Turns, turn_of_tokens
from learner.config.learner import BatchSettings
from learner.data.packing import Aggregation, cost, layouts, place_rows, trajectory_weights
from learner.data.token_values import TrajectorySource
from protocol.messages import Segment, Status, Trajectory, TrajectoryGroup
from protocol.staleness import lag
from protocol.versions import PolicyVersion, is_orphan

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class AdvantageEstimator(Protocol):
    """The part of an algorithm that a batch needs; `learner.algorithms.base.Algorithm` implements it."""

    aggregation: Aggregation
    aggregation_length: int
    minibatches: int
    bootstraps: bool

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64, one per trajectory; 0 for invalid ones."""

    def turn_advantages(self, outcomes: Outcomes, turns: Turns) -> npt.NDArray[np.float64] | None:
        """Return [n, K] float64, one per turn, or None if `advantages` apply to all turns of a trajectory."""

    def reward_scale(self, outcomes: Outcomes) -> float:
        """Return the factor on the rewards of tokens; called once per batch."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: R rows of L tokens and the N trained tokens in them.

    ids           [R, L] int64, 0 where padding
    positions     [R, L] int64, from 0 in each sequence
    document_ids  [R, L] int64, number of the document in its row, from 0; -1 where padding. A document is a sequence,
                  or a prompt and the rest of each sequence that shares it, whose positions continue the prompt's
    index         [N] int64, row * L + t of the input whose logits predict the trained token, `targets` [N] int64
    behaviour     [N] float32, its log-prob when it was sampled
    advantages    [N] float32
    token_weights [N] float32, its share in the loss; 0 only in dummies that pad a rank
    rewards       [N] float32, its reward: a turn's reward at the turn's last trained token, and at the last one of each
                  sequence what the trajectory earns after it: the outcome and the rewards of later turns
    lags          [N] int64, steps between the version that sampled it and the one being trained
    trajectory    [N] int64, its trajectory's number in the batch
    sequence      [N] int64, its training sequence's number in the batch: that of the trajectory for the first one that
                  is trained, below 0 for the others
    place         [N] int64, its place in the trajectory, over all sequences
    turn          [N] int64, number of its turn in the trajectory, from 0
    answer        [N] float32, in the last turn of an answered trajectory: mean searches of the batch's valid
                  trajectories; -1 elsewhere
    end           [N] int64, row * L + t of its trajectory's last token if that was truncated, its sequence is the last
                  and the algorithm bootstraps, -1 elsewhere
    """

    ids: IntArray
    positions: IntArray
    document_ids: IntArray
    index: IntArray
    targets: IntArray
    behaviour: FloatArray
    advantages: FloatArray
    token_weights: FloatArray
    rewards: FloatArray
    lags: IntArray
    trajectory: IntArray
    sequence: IntArray
    place: IntArray
    turn: IntArray
    answer: FloatArray
    end: IntArray


MiniBatch = tuple[MicroBatch, ...]
"""The micro-batches of one optimiser update."""


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a batch: as many parts as the other ranks, with as many micro-batches in each.

    num_tokens, stats and source refer to the whole batch.
    """

    minibatches: tuple[MiniBatch, ...]
    temperature: float
    num_tokens: int
    stats: dict[str, float]
    source: TrajectorySource = field(default_factory=TrajectorySource)


@dataclass(frozen=True)
class Batch:
    """Input of a training step, one optimiser update per part: each rank's `shares`, and `stats` for the metrics."""

    shares: tuple[tuple[MiniBatch, ...], ...]
    temperature: float
    num_tokens: int
    stats: dict[str, float]
    source: TrajectorySource = field(default_factory=TrajectorySource)

    @property
    def minibatches(self) -> tuple[MiniBatch, ...]:
        """Return the micro-batches of every part, from all ranks, without dummies."""
        parts = zip(*self.shares, strict=True)
        return tuple(tuple(m for share in part for m in share if m.token_weights.any()) for part in parts)

    @property
    def micro_batches(self) -> MiniBatch:
        """Return the micro-batches of all parts, without dummies."""
        return tuple(m for minibatch in self.minibatches for m in minibatch)

    @property
    def rank_batches(self) -> list[RankBatch]:
        """Return the batch of each rank."""
        rest = (self.temperature, self.num_tokens, self.stats, self.source)
        return [RankBatch(share, *rest) for share in self.shares]


@dataclass(frozen=True)
class UnscaledBatch:
    """A batch before the algorithm scales its rewards, by factors that may depend on all batches before it.

    credited  the outcomes with the rewards that are trained
    """

    batch: Batch
    credited: Outcomes

    def scaled(self, algorithm: AdvantageEstimator) -> Batch:
        """Return the batch for training. Call it once for each batch, in order of training."""
        scale = np.float32(algorithm.reward_scale(self.credited))
        if scale == 1:
            return self.batch

        def part(minibatch: MiniBatch) -> MiniBatch:
            return tuple(replace(m, rewards=m.rewards * scale) for m in minibatch)

        return replace(self.batch, shares=tuple(tuple(map(part, share)) for share in self.batch.shares))


@dataclass
class _Row:
    """A sequence to be trained: inputs [L], and the fields of `MicroBatch` for its n trained tokens.

    order, start  number of the sequence in its trajectory, and place of its first token there
    bootstraps  whether the last input is the trajectory's last token, for the value of the state after it
    """

    ids: IntArray
    trained: IntArray
    targets: IntArray
    behaviour: FloatArray
    rewards: FloatArray
    lags: IntArray
    turn: IntArray
    answers: npt.NDArray[np.bool_]
    number: int
    sequence: int
    order: int
    start: int
    group: int
    bootstraps: bool


@dataclass(frozen=True)
class _Unit:
    """What is placed as a whole: a sequence, or several behind one copy of their prompt.

    ids, positions  [L] int64, of the sequences `parts`
    starts          where each continues after the prompt, minus the prompt's length: input t of part i is
                    ids[starts[i] + t], or ids[t] within the prompt
    prompt          length of the prompt; 0 for a single sequence
    """

    ids: IntArray
    positions: IntArray
    parts: Sequence[_Row]
    starts: Sequence[int]
    prompt: int

    @classmethod
    def of(cls, parts: Sequence[_Row], prompt: int) -> _Unit:
        """Return the unit of `parts`, whose first `prompt` inputs are equal."""
        if len(parts) == 1:
            return cls(parts[0].ids, np.arange(len(parts[0].ids)), parts, [0], 0)
        rests = [len(part.ids) - prompt for part in parts]
        ids = np.concatenate([parts[0].ids[:prompt], *(part.ids[prompt:] for part in parts)])
        positions = np.concatenate([np.arange(prompt), *(prompt + np.arange(rest) for rest in rests)])
        return cls(ids, positions, parts, np.cumsum([0, *rests[:-1]]).tolist(), prompt)

    def places(self, number: int, inputs: IntArray) -> IntArray:
        """Return where the inputs of part `number` are in `ids`."""
        return np.where(inputs < self.prompt, inputs, inputs + self.starts[number])


@dataclass
class _Tally:
    """Token counts by outcome."""

    sampled: int = 0
    stale: int = 0
    orphan: int = 0
    invalid: int = 0


def prepare_batch(
    groups: Sequence[TrajectoryGroup],
    algorithm: AdvantageEstimator,
    *,
    now_step: int,
    lineage: Sequence[PolicyVersion],
    max_lag: int,
    settings: BatchSettings,
    temperature: float,
    ranks: int = 1,
) -> UnscaledBatch:
    """Build the batch of `groups`, independent of their order, without changing the algorithm's state.

    now_step     step of the policy that is about to be updated
    lineage      first version of each learner start, for `is_orphan`
    max_lag      in steps: tokens that are older are not trained
    temperature  at which the tokens were sampled, and their log-probs are computed
    settings     packing, and whether prompts are shared (`learner.batch`), for `ranks` that train it
    """
    groups = sorted(groups, key=lambda g: (g.seq, g.attempt))
    outcomes = Outcomes.of(groups)
    tally = _Tally()
    rows: list[_Row] = []
    pairs = [(place, t) for place, g in enumerate(groups) for t in g.trajectories]
    for number, (group, trajectory) in enumerate(pairs):
        bootstraps = algorithm.bootstraps and trajectory.status is Status.TRUNCATED
        for row in _trained_parts(trajectory, number, group, tally, now_step, lineage, max_lag, bootstraps):
            if rows and rows[-1].number == number:
                row.sequence = -len(rows)
            rows.append(row)
    credited = outcomes
    if settings.shuffle_rewards:
        credited = outcomes.shuffled(now_step)
        for row in rows:
            row.rewards = np.append(np.zeros(len(row.trained) - 1), credited.rewards[row.number]).astype(np.float32)
    advantages = algorithm.advantages(credited)
    by_turn = None if settings.shuffle_rewards else algorithm.turn_advantages(credited, Turns.of(groups))
    # one column per turn, or one for all turns
    table = advantages[:, None] if by_turn is None else by_turn
    # The capacity is the batch's, not the part's: row widths should not depend on how the batch is divided.
    capacity = max([settings.row_tokens, *(len(r.ids) for r in rows)]) if settings.row_tokens else 0
    divided = [[r for r in rows if r.group % algorithm.minibatches == n] for n in range(algorithm.minibatches)]
    searches = float(np.mean([t.searches for _, t in pairs if t.status.is_valid] or [0]))
    parts = [_part(part, table, algorithm, capacity, settings, ranks, searches) for part in divided if part]
    shares = tuple(tuple(part[rank] for part in parts) for rank in range(ranks))
    stats = _statistics(rows, parts, tally, outcomes, np.abs(table).max(1, initial=0.0))
    places = [place for g in groups for place in range(len(g.trajectories))]
    seqs = [group.seq for group in groups for _ in group.trajectories]
    source = TrajectorySource(now_step + 1, np.array(seqs, np.int64), np.array(places, np.int64))
    return UnscaledBatch(Batch(shares, temperature, sum(len(r.trained) for r in rows), stats, source), credited)


def build_batch(groups: Sequence[TrajectoryGroup], algorithm: AdvantageEstimator, **facts: Any) -> Batch:
    """Build the batch of `groups` for training by `algorithm`.

    facts  keyword arguments of `prepare_batch`: now_step and max_lag in steps, lineage, settings, temperature, ranks=1

    Return each rank's micro-batches (shapes: `MicroBatch`), and numbers for the metrics.
    """
    return prepare_batch(groups, algorithm, **facts).scaled(algorithm)


def _part(
    rows: Sequence[_Row],
    advantages: npt.NDArray[np.float64],
    algorithm: AdvantageEstimator,
    capacity: int,
    settings: BatchSettings,
    ranks: int,
    searches: float,
) -> list[MiniBatch]:
    """Return each rank's micro-batches of one update, with the update's own denominators. advantages [n, turns], or
    [n, 1] for all turns.

    Ranks get equally many micro-batches, because all take part in every collective. A rank with fewer trajectories
    than that gets dummies of weight 0.
    """
    counts = np.bincount([r.number for r in rows], [len(r.trained) for r in rows], len(advantages))
    weights = trajectory_weights(counts.astype(int).tolist(), algorithm.aggregation, algorithm.aggregation_length)
    units = _sharing(rows, settings) if settings.share_prompts else [_Unit.of([row], 0) for row in rows]
    found = layouts([len(u.ids) for u in units], ranks, capacity, settings.micro_batch_tokens)
    longest = max(len(layout) for layout in found)
    shares = []
    for layout in found:
        made = [_assemble([[units[i] for i in row] for row in m], advantages, weights, searches) for m in layout]
        shares.append((*made, *[_dummy()] * (longest - len(made))))
    return shares


def _sharing(rows: Sequence[_Row], settings: BatchSettings) -> list[_Unit]:
    """Return units of the sequences of each group that begin alike, of at most a row or a micro-batch: first sequences
    with first ones, and so on."""
    limit = settings.row_tokens or settings.micro_batch_tokens
    alike, units = attrgetter("group", "order"), []
    for _, group in groupby(sorted(rows, key=alike), alike):
        parts = list(group)
        prompt = _common_prompt(parts)
        while parts:
            sizes = np.cumsum([len(part.ids) - prompt for part in parts]) + prompt
            count = max(1, int((sizes <= limit).sum())) if prompt else 1
            units.append(_Unit.of(parts[:count], prompt))
            parts = parts[count:]
    return units


def _common_prompt(rows: Sequence[_Row]) -> int:
    """Return how many inputs all rows begin with, all of them before the first token that is trained in any."""
    first = rows[0].ids
    length = min(int(row.trained[0]) for row in rows)
    return min(int(np.cumprod(first[:length] == row.ids[:length]).sum()) for row in rows)


def _trained_parts(
    trajectory: Trajectory,
    number: int,
    group: int,
    tally: _Tally,
    now_step: int,
    lineage: Sequence[PolicyVersion],
    max_lag: int,
    bootstraps: bool,
) -> list[_Row]:
    tally.sampled += trajectory.num_sampled
    if not trajectory.status.is_valid:
        tally.invalid += trajectory.num_sampled
        return []
    trained = trajectory.mask.copy()
    lags = np.zeros(len(trained), np.int64)
    base = 0
    for segment in trajectory.segments:
        for span in segment.spans:
            place = slice(base + span.start, base + span.end)
            lags[place] = lag(now_step, span.version)
            orphan = is_orphan(span.version, lineage)
            if orphan or lag(now_step, span.version) > max_lag:
                trained[place] = False
                tally.orphan += orphan * (span.end - span.start)
                tally.stale += (not orphan) * (span.end - span.start)
        base += len(segment.ids)
    ids, turns = trajectory.ids.astype(np.int64), turn_of_tokens(trajectory)
    rows, start, rest = [], 0, trajectory.reward
    sequences = trajectory.sequences
    for order, segments in enumerate(sequences):
        end = start + sum(len(segment.ids) for segment in segments)
        trained[start : start + 1] = False  # nothing predicts the first token
        at = np.flatnonzero(trained[start:end])
        last = bootstraps and order + 1 == len(sequences)
        if len(at):
            rows.append(
                _Row(
                    # Attention is causal: the last trained token and what follows need not be computed, unless the
                    # critic must give the value of the state after it.
                    ids=ids[start : end if last else start + at[-1]],
                    trained=at,
                    targets=ids[start + at],
                    behaviour=trajectory.logprobs[start + at],
                    rewards=_credit(segments, at, rest),
                    lags=lags[start + at],
                    turn=turns[start + at],
                    answers=(turns[start + at] == turns.max()) & (trajectory.status is Status.ANSWERED),
                    number=number,
                    sequence=number,
                    order=order,
                    start=start,
                    group=group,
                    bootstraps=last,
                )
            )
        start, rest = end, rest - sum(segment.reward for segment in segments)
    return rows


def _credit(segments: Sequence[Segment], at: IntArray, rest: float) -> FloatArray:
    """Return [n] float32: rewards at the trained tokens `at` of a sequence, which sum to `rest`: what the trajectory
    earns from its beginning on. A reward at an untrained token goes to the last trained token before it, or else to the
    first trained one.
    """
    out = np.zeros(len(at))
    base = 0
    for segment in segments:
        base += len(segment.ids)
        if segment.reward:
            out[max(0, int(np.searchsorted(at, base)) - 1)] += segment.reward
            rest -= segment.reward
    out[-1] += rest
    return out.astype(np.float32)


def _assemble(
    rows: Sequence[Sequence[_Unit]],
    advantages: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    searches: float,
) -> MicroBatch:
    placed = place_rows([[unit.ids for unit in row] for row in rows])
    index, ends, parts = [], [], []
    for start, unit in zip(placed.starts, (unit for row in rows for unit in row), strict=True):
        placed.positions.ravel()[start : start + len(unit.ids)] = unit.positions
        for number, part in enumerate(unit.parts):
            parts.append(part)
            index.append(start + unit.places(number, part.trained - 1))
            ends.append(start + unit.starts[number] + len(part.ids) - 1 if part.bootstraps else -1)
    sizes = [len(p.trained) for p in parts]
    numbers = np.repeat([p.number for p in parts], sizes)
    turns = np.concatenate([p.turn for p in parts])
    return MicroBatch(
        ids=placed.ids,
        positions=placed.positions,
        document_ids=placed.document_ids,
        index=np.concatenate(index),
        targets=np.concatenate([p.targets for p in parts]),
        behaviour=np.concatenate([p.behaviour for p in parts]),
        advantages=advantages[numbers, np.minimum(turns, advantages.shape[1] - 1)].astype(np.float32),
        token_weights=weights[numbers].astype(np.float32),
        rewards=np.concatenate([p.rewards for p in parts]),
        lags=np.concatenate([p.lags for p in parts]),
        trajectory=numbers,
        sequence=np.repeat([p.sequence for p in parts], sizes),
        place=np.concatenate([p.start + p.trained for p in parts]),
        turn=turns,
        answer=np.where(np.concatenate([p.answers for p in parts]), searches, -1).astype(np.float32),
        end=np.repeat(np.array(ends, np.int64), sizes),
    )


def _dummy() -> MicroBatch:
    one, zero, nothing = np.zeros((1, 1), np.int64), np.zeros(1, np.int64), np.zeros(1, np.float32)
    floats, counts = (nothing,) * 4, (zero,) * 5
    return MicroBatch(one, one, one, zero, zero, *floats, *counts, answer=nothing - 1, end=zero - 1)


def _statistics(
    rows: Sequence[_Row],
    parts: Sequence[Sequence[MiniBatch]],
    tally: _Tally,
    outcomes: Outcomes,
    advantages: npt.NDArray[np.float64],
) -> dict[str, float]:
    lags = np.concatenate([r.lags for r in rows]) if rows else np.zeros(1, np.int64)
    micro_batches = [m for part in parts for share in part for m in share if m.token_weights.any()]
    slots = sum(m.ids.size for m in micro_batches)
    read = sum(int((m.document_ids >= 0).sum()) for m in micro_batches)
    spent = np.array([[sum(_cost(m) for m in share) for share in part] for part in parts], np.float64)
    valid = outcomes.rewards[outcomes.valid]
    return {
        "lag_mean": float(lags.mean()),
        "lag_max": float(lags.max()),
        "reward_mean": float(valid.mean()) if len(valid) else 0.0,
        "trajectories": float(len(advantages)),
        "trajectories_trained": float(len({r.number for r in rows})),
        "sequences_trained": float(len(rows)),
        "zero_advantage_share": float((advantages == 0).mean()) if len(advantages) else 0.0,
        "tokens_sampled": float(tally.sampled),
        "tokens_stale": float(tally.stale),
        "tokens_orphan": float(tally.orphan),
        "tokens_invalid": float(tally.invalid),
        "tokens_read": float(read),
        "tokens_shared": float(sum(len(r.ids) for r in rows) - read),
        "padding_share": 1.0 - read / slots if slots else 0.0,
        "micro_batches": float(len(micro_batches)),
        "rank_balance": float(spent.mean(1).sum() / spent.max(1).sum()) if parts else 1.0,
    }


def _cost(micro_batch: MicroBatch) -> int:
    squares = np.where(micro_batch.document_ids >= 0, 2 * micro_batch.positions + 1, 0).sum()  # 1 + 3 + ... = length^2
    return cost(micro_batch.ids.size, int(squares))
