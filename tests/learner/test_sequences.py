"""Trajectories of several training sequences: which tokens are trained, and every loss against a loop in float64.

The reference never joins sequences: it goes over them one by one, as they were generated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from pydantic import TypeAdapter

from learner.algorithms import build_algorithm
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.advantages.turns import Turns
from learner.algorithms.base import LossOutput, TokenInputs
from learner.config.algorithm import AlgorithmSettings, GrpoSettings, PpoSettings
from learner.config.learner import BatchSettings, TrainerSettings
from learner.config.model import CriticSettings
from learner.data.batch import Batch, RankBatch, build_batch
from learner.data.token_values import TokenValues, read_token_values
from learner.delivery.token_accounting import token_split
from learner.trainer.scoring import ScoredTokens, score
from learner.trainer.step import critic_loss, policy_loss
from learner.trainer.trainer import Trainer
from protocol.messages import Owner, Segment, Status, Trajectory, TrajectoryGroup
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.messages import make_group, make_question, observation_segment, policy_segment, prompt_segment

KINDS = [get_args(m)[0].model_fields["type"].default for m in get_args(get_args(AlgorithmSettings)[0])]
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one micro-batch": ({}, 1),
    "a micro-batch each": ({"micro_batch_tokens": 1}, 1),
    "packed rows": ({"row_tokens": 30}, 1),
    "shared prompts": ({"share_prompts": True}, 1),
    "two ranks": ({"row_tokens": 30, "micro_batch_tokens": 1}, 2),
}
NOW, FRESH, STALE = 5, PolicyVersion(1, 5), PolicyVersion(1, 1)
Key = tuple[int, int]
"""Number of a trajectory in the batch, place of a token in it."""


def segments_of(rng: np.random.Generator, spec: str) -> Iterator[Segment]:
    """p: a prompt, t: a turn, T: a turn that is too old, R: a turn with a reward, o: an observation."""
    for kind in spec:
        ids = rng.integers(6, 40, rng.integers(2, 5)).tolist()
        if kind == "p":
            yield prompt_segment([1, 2, 3, *ids[:1]])
        elif kind == "o":
            yield observation_segment(ids)
        else:
            turn = policy_segment(ids, (-3.5 + rng.normal(0, 0.2, len(ids))).tolist(), STALE if kind == "T" else FRESH)
            yield turn.model_copy(update={"reward": 0.25}) if kind == "R" else turn


SPECS = (("pRotpt", "pt", "pototpRpRot", "pTpt"), ("ptpt", "pRoTptpTp", "ptotpo", "pt", "pRpt"))


def groups(seed: int = 0) -> list[TrajectoryGroup]:
    """Unequal numbers of sequences, some without a trained token, the third of each group cut off, one failed."""
    rng, made = np.random.default_rng(seed), []
    for seq, specs in enumerate(SPECS, 1):
        trajectories = []
        for n, spec in enumerate(specs):
            status = Status.TRUNCATED if n == 2 else Status.FAILED if n == 3 and seq == 2 else Status.ANSWERED
            reward = float(n % 2) + 0.25 * spec.count("R")
            trajectories.append(Trajectory(status=status, segments=tuple(segments_of(rng, spec)), reward=reward))
        made.append(TrajectoryGroup(run="t", seq=seq, question=make_question(seq), trajectories=tuple(trajectories)))
    return made


def build(given: list[TrajectoryGroup], algorithm: Any, layout: str = "one micro-batch", **settings: Any) -> Batch:
    batch, ranks = LAYOUTS[layout]
    return build_batch(
        given,
        algorithm,
        now_step=NOW,
        lineage=(PolicyVersion(1, 0),),
        max_lag=2,
        settings=BatchSettings(**batch | settings),
        temperature=1.0,
        ranks=ranks,
    )


# ---- the reference


@dataclass
class Sequence:
    """One sequence of the reference: all its ids, where its trained tokens are, and what is known of each."""

    trajectory: int
    start: int
    ids: list[int]
    trained: list[int]
    behaviour: list[float]
    rewards: list[float]
    turns: list[int]
    ends_cut: bool

    @property
    def keys(self) -> list[Key]:
        return [(self.trajectory, self.start + at) for at in self.trained]


def sequences_of(given: list[TrajectoryGroup]) -> list[Sequence]:
    found = []
    for number, trajectory in enumerate(t for g in given for t in g.trajectories):
        owed, place, turn, parts = trajectory.reward, 0, 0, []
        for segment in trajectory.segments:
            if segment.owner is Owner.PROMPT:
                parts.append(Sequence(number, place, [], [], [], [], [], False))
            one, fresh = parts[-1], bool(segment.spans) and segment.spans[0].version == FRESH
            for n, token in enumerate(segment.ids.tolist()):
                if fresh:
                    one.trained.append(len(one.ids))
                    one.behaviour.append(float(segment.logprobs[n]))
                    one.rewards.append(0.0)
                    one.turns.append(turn)
                one.ids.append(token)
            place += len(segment.ids)
            turn += segment.owner is Owner.POLICY
        parts[-1].ends_cut = trajectory.status is Status.TRUNCATED
        if trajectory.status is Status.FAILED:
            continue
        # a turn's reward is at the turn; the end of a sequence earns what the trajectory still earns
        turn = part = -1
        for segment in trajectory.segments:
            part += segment.owner is Owner.PROMPT
            turn += segment.owner is Owner.POLICY
            one = parts[part]
            owed -= segment.reward
            if segment.reward and one.trained:
                one.rewards[max(n for n, t in enumerate(one.turns) if t == turn)] += segment.reward
            last = segment is trajectory.segments[-1] or segment is one_last(trajectory, part)
            if last and one.trained:
                one.rewards[-1] += owed
        found += [one for one in parts if one.trained]
    return found


def one_last(trajectory: Trajectory, part: int) -> Segment:
    """The last segment of a sequence."""
    begins = [n for n, segment in enumerate(trajectory.segments) if segment.owner is Owner.PROMPT]
    return trajectory.segments[begins[part + 1] - 1 if part + 1 < len(begins) else -1]


def weights_of(found: list[Sequence], algorithm: Any) -> dict[int, float]:
    """The weight of each token of a trajectory, from the formulas of `trajectory_weights`."""
    counts: dict[int, int] = {}
    for one in found:
        counts[one.trajectory] = counts.get(one.trajectory, 0) + len(one.trained)
    mode, length = algorithm.aggregation, algorithm.aggregation_length
    each = {
        "token_mean": lambda n: 1 / sum(counts.values()),
        "token_sum": lambda n: 1.0,
        "seq_mean_token_mean": lambda n: 1 / (n * len(counts)),
        "seq_mean_token_sum": lambda n: 1 / (max(length, 1) * len(counts)),
        "seq_mean_token_sum_norm": lambda n: 1 / (max(length, 1) * len(counts)),
    }[mode]
    return {number: each(n) for number, n in counts.items()}


Values = dict[Key, torch.Tensor]


@dataclass
class Known:
    """What models say, per token, in float64; `after`: the critic's value behind a sequence that was cut off."""

    policy: Values
    old: dict[Key, float]
    reference: dict[Key, float]
    values: dict[Key, float]
    after: dict[int, float]


def slow_advantages(
    found: list[Sequence], given: list[TrajectoryGroup], known: Known, algorithm: Any
) -> dict[Key, float]:
    """GRPO's per trajectory and turn; GAE and discounted rewards per sequence, minus the divergence, whitened."""
    s = algorithm.policy_settings
    if s.type not in ("ppo", "reinforce_pp"):
        outcomes = Outcomes.of(given)
        by_turn = algorithm.turn_advantages(outcomes, Turns.of(given))
        whole = algorithm.advantages(outcomes)
        return {
            key: float(whole[one.trajectory] if by_turn is None else by_turn[one.trajectory, turn])
            for one in found
            for key, turn in zip(one.keys, one.turns, strict=True)
        }
    estimates: dict[Key, float] = {}
    for one in found:
        lam = s.lam if s.type == "ppo" else 1.0
        ahead = known.after.get(one.trajectory, 0.0) if one.ends_cut and algorithm.bootstraps else 0.0
        carried = 0.0
        for key, reward in zip(reversed(one.keys), reversed(one.rewards), strict=True):
            reward -= s.kl.coefficient * (known.old[key] - known.reference[key])
            value = known.values[key] if s.type == "ppo" else 0.0
            carried = reward + s.gamma * ahead - value + s.gamma * lam * carried
            ahead = value
            estimates[key] = carried
    if s.whiten:
        mean = math.fsum(estimates.values()) / len(estimates)
        variance = math.fsum((x - mean) ** 2 for x in estimates.values()) / (len(estimates) - 1)
        return {key: (x - mean) / math.sqrt(variance + 1e-8) for key, x in estimates.items()}
    return estimates


def corrected(one: Sequence, old: dict[Key, float], s: Any) -> list[float]:
    """Truncated importance weights of a sequence's tokens, proximal / behaviour; `geometric`: their mean's for all."""
    assert s.correction.mode == "truncate" and s.correction.level in ("token", "geometric")
    gaps = [old[key] - behaviour for key, behaviour in zip(one.keys, one.behaviour, strict=True)]
    if s.correction.level == "geometric":
        gaps = [math.fsum(gaps) / len(gaps)] * len(gaps)
    return [min(math.exp(gap), s.correction.high) for gap in gaps]


def clip_gain(ratio: torch.Tensor, gain: float, s: Any) -> torch.Tensor:
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - s.clip_low, 1 + s.clip_high))
    return torch.minimum(loss, torch.tensor(-gain * s.dual_clip)) if s.dual_clip and gain < 0 else loss


def slow_loss(found: list[Sequence], given: list[TrajectoryGroup], known: Known, algorithm: Any) -> torch.Tensor:
    """The batch's loss: GSPO and PPO from their formulas, the others by their loss of each sequence alone."""
    s = algorithm.policy_settings
    gains, weights = slow_advantages(found, given, known, algorithm), weights_of(found, algorithm)
    total = torch.zeros((), dtype=torch.float64)
    for one in found:
        old = dict(zip(one.keys, one.behaviour, strict=True))
        if s.old_logprobs == "recompute":
            old = {key: known.old[key] for key in one.keys}
        gaps = torch.stack([known.policy[key] - old[key] for key in one.keys])
        importance = corrected(one, old, s)
        if s.type == "gspo":
            fixed = gaps.detach()
            for n, key in enumerate(one.keys):
                ratio = torch.exp(fixed.mean() + gaps[n] - fixed[n])
                token = torch.maximum(-gains[key] * ratio, -gains[key] * ratio.clamp(1 - s.clip_low, 1 + s.clip_high))
                total = total + weights[one.trajectory] * importance[n] * token
        elif s.type == "ppo":
            for n, key in enumerate(one.keys):
                token = clip_gain(gaps[n].exp(), gains[key], s)
                total = total + weights[one.trajectory] * importance[n] * token
        else:
            total = total + alone(one, old, gains, weights[one.trajectory], known, algorithm).loss
    return total


def alone(
    one: Sequence, old: dict[Key, float], gains: dict[Key, float], weight: float, known: Known, algorithm: Any
) -> LossOutput:
    """The product's loss of one sequence, which other tests compare with loops over tokens."""
    n = len(one.trained)

    def column(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float64)

    return algorithm.loss(
        TokenInputs(
            logprobs=torch.stack([known.policy[key] for key in one.keys]),
            entropy=torch.zeros(n, dtype=torch.float64),
            behaviour=column(one.behaviour),
            old=column(old.values()),
            reference=column(known.reference[key] for key in one.keys),
            advantages=column(gains[key] for key in one.keys),
            token_weights=torch.full((n,), weight, dtype=torch.float64),
            mask=torch.ones(n, dtype=torch.bool),
            trajectory=torch.zeros(n, dtype=torch.int64),
            lags=torch.zeros(n, dtype=torch.int64),
            turn=torch.zeros(n, dtype=torch.int64),
            answer=torch.full((n,), -1.0, dtype=torch.float64),
        )
    )


# ---- the product, with log-probs from a table


def keys_of(tokens: ScoredTokens) -> list[Key]:
    return list(zip(tokens.trajectory.tolist(), tokens.place.tolist(), strict=True))


def product_loss(batch: Batch, known: Known, algorithm: Any) -> torch.Tensor:
    """`learner.trainer.step` on every micro-batch of all ranks, with a model that looks tokens up."""
    scored = [ScoredTokens.of(m, 0, 1.0, torch.device("cpu")) for m in batch.micro_batches]
    for tokens in scored:
        for name in ("behaviour", "advantages", "token_weights", "rewards"):
            setattr(tokens, name, getattr(tokens, name).double())
        keys = keys_of(tokens)
        tokens.old, tokens.reference, tokens.values = (
            torch.tensor([column[key] for key in keys], dtype=torch.float64)
            for column in (known.old, known.reference, known.values)
        )
        ends = zip(tokens.trajectory.tolist(), tokens.end.tolist(), strict=True)
        tokens.last_values = torch.tensor([known.after[n] if end >= 0 else 0.0 for n, end in ends]).double()
    judged, _ = algorithm.compute_advantages([tokens.scores for tokens in scored], lambda vector: vector)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, found in zip(scored, judged, strict=True):
        tokens.advantages = found.advantages
        logprobs = torch.stack([known.policy[key] for key in keys_of(tokens)])
        answer = SimpleNamespace(logprobs=logprobs, entropy=torch.zeros_like(logprobs).detach(), values=None)
        policy = SimpleNamespace(forward=lambda *_, answer=answer: answer)
        models: Any = SimpleNamespace(policy=policy, settings=SimpleNamespace(critic=CriticSettings()))
        total = total + policy_loss(tokens, models, algorithm).loss
    return total


def drawn(found: list[Sequence], seed: int = 3) -> Known:
    rng = np.random.default_rng(seed)
    keys = [key for one in found for key in one.keys]
    near = {key: b for one in found for key, b in zip(one.keys, one.behaviour, strict=True)}

    def column(scale: float) -> dict[Key, float]:
        return {key: float(near[key] + rng.normal(0, scale)) for key in keys}

    leaves = {key: torch.tensor(x, dtype=torch.float64, requires_grad=True) for key, x in column(0.2).items()}
    values = {key: float(rng.normal()) for key in keys}
    return Known(leaves, column(0.1), column(0.3), values, {n: float(rng.normal()) for n in range(9)})


def algorithm_of(kind: str, **settings: Any) -> Any:
    given: dict[str, Any] = {"type": kind, "whiten": kind in ("ppo", "reinforce_pp")}
    given["kl"] = {"coefficient": 0.05} | ({"type": "k3"} if kind in ("ema_pg", "distill") else {})
    if kind in ("ppo", "reinforce_pp"):
        given |= {"gamma": 0.9}
        given["kl"] |= {"place": "reward", "type": "k1"}
    if kind == "ppo":
        given |= {"lam": 0.8}
    else:  # whole sequences are rejected
        given["rejection"] = {"level": "geometric", "low": 0.85, "high": 1.15} if kind != "gspo" else {}
    if kind in ("gspo", "gmpo"):
        given |= {"clip_low": 0.05, "clip_high": 0.05}
    if kind == "gspo":
        given["kl"] = {}
    return build_algorithm(TypeAdapter(AlgorithmSettings).validate_python(given | settings))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_a_loop_over_the_sequences(kind: str) -> None:
    given, algorithm = groups(), algorithm_of(kind)
    found = sequences_of(given)
    known = drawn(found)
    wanted = slow_loss(found, given, known, algorithm)
    leaves = list(known.policy.values())
    expected = torch.stack(torch.autograd.grad(wanted, leaves))
    for layout in LAYOUTS:
        loss = product_loss(build(given, algorithm, layout), known, algorithm)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-7), layout
        gradient = torch.stack(torch.autograd.grad(loss, leaves))
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7, msg=layout)
    assert (gradient != 0).sum() > 10


@pytest.mark.parametrize(
    "settings", [{"turns": "turn"}, {"aggregation": "seq_mean_token_sum", "aggregation_length": 9}]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_turns_and_lengths_are_those_of_the_whole_trajectory(settings: dict[str, Any], layout: str) -> None:
    given, algorithm = groups(), algorithm_of("grpo", **settings)
    found = sequences_of(given)
    known = drawn(found)
    wanted = slow_loss(found, given, known, algorithm)
    assert product_loss(build(given, algorithm, layout), known, algorithm).item() == pytest.approx(
        wanted.item(), rel=1e-5
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gspo", "gmpo")])
def test_one_sequence_and_several_give_the_same_loss_where_the_page_says_so(kind: str) -> None:
    """Losses per token; without discount, values and divergence also those with returns of tokens."""
    plain: dict[str, Any] = {"rejection": {}}
    if kind in ("ppo", "reinforce_pp"):
        plain |= {"gamma": 1.0, "kl": {"coefficient": 0.0}} | ({"lam": 1.0} if kind == "ppo" else {})
    given, algorithm = groups(), algorithm_of(kind, **plain)
    joined = [g.model_copy(update={"trajectories": tuple(map(as_one, g.trajectories))}) for g in given]
    known = drawn(sequences_of(given))
    known.values, known.after = dict.fromkeys(known.values, 0.0), dict.fromkeys(known.after, 0.0)
    two, one = (product_loss(build(g, algorithm), known, algorithm) for g in (given, joined))
    assert one.item() == pytest.approx(two.item(), rel=1e-6)
    leaves = list(known.policy.values())
    gradients = [torch.stack(torch.autograd.grad(loss, leaves)) for loss in (one, two)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def as_one(trajectory: Trajectory) -> Trajectory:
    """The same tokens, later prompts as observations."""
    first, *rest = trajectory.segments
    later = [observation_segment(s.ids.tolist()) if s.owner is Owner.PROMPT else s for s in rest]
    return trajectory.model_copy(update={"segments": (first, *later)})


# ---- the batch


AGGREGATIONS = ("token_mean", "seq_mean_token_mean")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_sum_to_one_with_unequal_numbers_of_sequences(aggregation: str, layout: str) -> None:
    given = groups()
    batch = build(given, build_algorithm(GrpoSettings(aggregation=aggregation)), layout)
    weights: dict[int, float] = {}
    for m in batch.micro_batches:
        for number, weight in zip(m.trajectory.tolist(), m.token_weights.tolist(), strict=True):
            weights[number] = weights.get(number, 0.0) + weight
    assert sum(weights.values()) == pytest.approx(1)
    if aggregation == "seq_mean_token_mean":
        assert list(weights.values()) == pytest.approx([1 / len(weights)] * len(weights))
    found = sequences_of(given)
    assert batch.stats["trajectories_trained"] == len({one.trajectory for one in found}) == len(weights) == 8
    assert batch.stats["sequences_trained"] == len(found) == 14
    sampled = sum(t.num_sampled for g in given for t in g.trajectories)
    split = token_split(batch, given, len(given), None)
    assert (split.trained, split.trained + split.masked) == (batch.num_tokens, sampled)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_is_read_without_the_segments_before_its_prompt(layout: str) -> None:
    given = groups()
    batch = build(given, build_algorithm(PpoSettings()), layout)
    seen = {}
    for m in batch.micro_batches:
        for n, at in enumerate(m.index.tolist()):
            row, last = divmod(at, m.ids.shape[1])
            inside = np.flatnonzero(m.document_ids[row] == m.document_ids[row, last])
            inside = inside[inside <= last]
            # behind a shared prompt the rests follow one another: a token reads the prompt and its own rest
            context: dict[int, int] = {}
            for place in inside:
                context[int(m.positions[row, place])] = int(m.ids[row, place])
            own = [context[position] for position in range(int(m.positions[row, last]) + 1)]
            seen[int(m.trajectory[n]), int(m.place[n])] = [*own, int(m.targets[n])]
        assert len(np.unique(m.sequence)) == len({(a, b) for a, b in zip(m.trajectory, m.sequence, strict=True)})
    wanted = {
        key: one.ids[: at + 1] for one in sequences_of(given) for key, at in zip(one.keys, one.trained, strict=True)
    }
    assert seen == wanted
    parts = [set(m.trajectory.tolist()) for m in batch.micro_batches]
    if layout in ("a micro-batch each", "two ranks"):
        assert sum(2 in part for part in parts) > 1, "one trajectory lies in several micro-batches"


def test_rewards_repeat_at_the_end_of_each_sequence_what_the_trajectory_still_earns() -> None:
    def one(*segments: Segment) -> TrajectoryGroup:
        trajectory = Trajectory(status=Status.TRUNCATED, segments=segments, reward=2.0)
        return TrajectoryGroup(run="t", seq=1, question=make_question(1), trajectories=(trajectory,))

    def turn(reward: float) -> Segment:
        return policy_segment([7, 8], version=FRESH).model_copy(update={"reward": reward})

    first, second = (
        (prompt_segment([1, 2, 1, 2, 1]), turn(0.5), turn(0.25)),
        (turn(0.75), observation_segment([9]), turn(0.0)),
    )
    algorithm = build_algorithm(PpoSettings())
    (m,) = build([one(*first, prompt_segment([3]), *second)], algorithm).micro_batches
    assert m.rewards.tolist() == [0, 0.5, 0, 0.25 + 1.25, 0, 0.75, 0, 0.5]
    assert m.turn.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert m.place.tolist() == [5, 6, 7, 8, 10, 11, 13, 14]
    assert (m.end >= 0).tolist() == [False] * 4 + [True] * 4, "only the last sequence was cut off"
    (whole,) = build([one(*first, observation_segment([3]), *second)], algorithm).micro_batches
    assert whole.rewards.tolist() == [0, 0.5, 0, 0.25, 0, 0.75, 0, 0.5]

    def left(rewards: np.ndarray) -> list[float]:
        return rewards[::-1].cumsum()[::-1].tolist()

    assert left(m.rewards[:4]) + left(m.rewards[4:]) == left(whole.rewards), (
        "undiscounted, each token's return is the same"
    )
    np.testing.assert_array_equal(m.token_weights, whole.token_weights)
    np.testing.assert_array_equal(m.advantages, whole.advantages)


def test_shuffled_rewards_reach_every_sequence() -> None:
    batch = build(groups(), build_algorithm(GrpoSettings()), shuffle_rewards=True)
    earned: dict[int, dict[int, float]] = {}
    for m in batch.micro_batches:
        for number, sequence, reward in zip(
            m.trajectory.tolist(), m.sequence.tolist(), m.rewards.tolist(), strict=True
        ):
            of = earned.setdefault(number, {})
            of[sequence] = of.get(sequence, 0.0) + reward
    assert all(len(set(of.values())) == 1 for of in earned.values()), earned
    assert max(len(of) for of in earned.values()) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trajectories_of_one_sequence_are_batched_as_before(layout: str) -> None:
    given = [make_group(s, (1.0, 0.0, 0.5), version=FRESH, length=s) for s in range(1, 7)]
    for m in build(given, build_algorithm(GrpoSettings()), layout).micro_batches:
        np.testing.assert_array_equal(m.sequence, m.trajectory)
        np.testing.assert_array_equal(m.place, m.positions.flat[m.index] + 1)


def test_an_adaptive_coefficient_counts_trajectories() -> None:
    given = groups()
    algorithm = algorithm_of("ppo", kl={"coefficient": 0.1, "target": 0.01, "horizon": 100})
    known = drawn(sequences_of(given))
    known.reference = {key: value - 1.0 for key, value in known.old.items()}  # far: the error is at its bound of .2
    product_loss(build(given, algorithm, "two ranks"), known, algorithm)
    algorithm.after_update()
    assert algorithm.state()["kl"]["coefficient"] == pytest.approx(0.1 * (1 + 0.2 * 8 / 100))


def test_values_of_tokens_are_found_by_their_place_in_the_trajectory(tmp_path: Path) -> None:
    given = groups()
    batch = build(given, build_algorithm(GrpoSettings()), "two ranks")
    for rank, share in enumerate(batch.rank_batches):
        values = TokenValues()
        for m in (m for part in share.minibatches for m in part):
            tokens = ScoredTokens.of(m, 0, 1.0, torch.device("cpu"))
            tokens.logprobs = tokens.behaviour
            values.add(**tokens.columns)
        values.write(tmp_path / "token_values", share.source, rank=rank, keep=1)
    trajectory = given[0].trajectories[2]
    found = read_token_values(tmp_path, NOW + 1, 1, 2)
    assert found["position"].tolist() == np.flatnonzero(trajectory.mask).tolist()
    np.testing.assert_array_equal(found["logprob"], trajectory.logprobs[found["position"]])


# ---- a model


@pytest.mark.parametrize("layout", ["packed rows", "shared prompts", "two ranks"])
@pytest.mark.parametrize("kind", ["gspo", "ppo"])
def test_gradients_of_models_are_those_of_float64_models_that_read_each_sequence_alone(
    kind: str, layout: str, tiny_qwen: Path
) -> None:
    settings = {"algorithm": algorithm_of(kind).policy_settings, "reference": {"kind": "frozen"}}
    trainer = Trainer(RunSettings(model=tiny_qwen, steps=1), TrainerSettings.model_validate(settings))
    models, algorithm, given = trainer._models, trainer.algorithm, groups()
    policy: Any = copy.deepcopy(models.policy.module.causal).double()
    torch.manual_seed(0)
    if models.critic is not None:
        torch.nn.init.normal_(next(models.critic.engine.module.head.parameters()), std=0.3)
    if models.reference is not None:  # else it would be the policy
        for parameter in policy.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        models.policy.module.causal.load_state_dict(policy.state_dict())
        policy = copy.deepcopy(models.policy.module.causal).double()
    critic: Any = copy.deepcopy(models.critic.engine.module).double() if models.critic is not None else None
    frozen = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen, dtype=torch.float64)
    known, found, values = Known({}, {}, {}, {}, {}), sequences_of(given), {}
    for one in found:
        ids = torch.tensor([one.ids])
        for model, column in ((policy, known.policy), (frozen, known.reference)):
            table = torch.log_softmax(model(ids, use_cache=False).logits[0], -1)
            column |= {key: table[at - 1, one.ids[at]] for key, at in zip(one.keys, one.trained, strict=True)}
        if critic is not None:
            each = critic(ids, torch.arange(len(one.ids))[None], None, torch.arange(len(one.ids)))
            values |= {key: each[at - 1].double() for key, at in zip(one.keys, one.trained, strict=True)}
            known.after[one.trajectory] = float(each[-1].detach())
    known.old = {key: float(value.detach()) for key, value in known.policy.items()}
    known.reference = {key: float(value.detach()) for key, value in known.reference.items()}
    known.values = {key: float(value.detach()) for key, value in values.items()}
    names = [name for name, _ in policy.named_parameters()]
    wanted = dict(
        zip(names, torch.autograd.grad(slow_loss(found, given, known, algorithm), policy.parameters()), strict=True)
    )

    batch = build(given, algorithm, layout)
    batch = RankBatch(batch.minibatches, 1.0, batch.num_tokens, {})  # of all ranks, in one process
    scored = score(batch, models, algorithm)
    judged, _ = algorithm.compute_advantages([tokens.scores for tokens in scored], models.policy.all_reduce)
    for tokens, estimate in zip(scored, judged, strict=True):
        tokens.advantages, tokens.returns = estimate.advantages, estimate.returns
    bare: Any = SimpleNamespace(policy=SimpleNamespace(forward=models.policy.module), settings=models.settings)
    loss = sum(policy_loss(tokens, bare, algorithm).loss for tokens in scored)
    own = dict(models.policy.module.causal.named_parameters())
    compare(dict(zip(names, torch.autograd.grad(loss, [own[name] for name in names]), strict=True)), wanted)
    if models.critic is None:
        return
    # the critic: half the squared error to GAE's return, before whitening
    plain = build_algorithm(algorithm.policy_settings.model_copy(update={"whiten": False}))
    returns = slow_advantages(found, given, known, plain)
    weights = weights_of(found, algorithm)
    error = sum(
        weights[key[0]] * 0.5 * (value - (returns[key] + known.values[key])) ** 2 for key, value in values.items()
    )
    names = [name for name, _ in critic.named_parameters()]
    expected = dict(zip(names, torch.autograd.grad(error, critic.parameters()), strict=True))
    module = models.critic.engine.module
    loss = sum(critic_loss(module(*tokens.inputs), tokens, CriticSettings(clip=0)).loss for tokens in scored)
    own = dict(module.named_parameters())
    compare(dict(zip(names, torch.autograd.grad(loss, [own[name] for name in names]), strict=True)), expected)


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    largest = max(float(value.abs().max()) for value in wanted.values())
    assert largest > 1e-4
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-3, atol=1e-5 * largest, msg=name)
