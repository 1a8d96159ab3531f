"""Which tokens are trained, where they lie, and what they weigh."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms import build_algorithm, grpo
from learner.config.algorithm import GrpoSettings, PpoSettings
from learner.config.learner import BatchSettings
from learner.data.batch import Batch, MicroBatch, build_batch
from learner.data.packing import cut_rows, pack_rows, trajectory_weights
from protocol.messages import Owner, Segment, Status, Trajectory, TrajectoryGroup, VersionSpan
from protocol.versions import PolicyVersion
from tests.support.messages import (
    make_group,
    make_question,
    make_trajectory,
    observation_segment,
    policy_segment,
    prompt_segment,
)

FIRST_START = (PolicyVersion(1, 0),)


def build(
    groups, *, now_step=0, lineage=FIRST_START, max_lag=2, row_tokens=0, budget=4096, share=False, ranks=1,
    exact=False, **algorithm,
):  # fmt: skip
    """exact: deviations divide by n, with nothing added."""
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            patch.setattr(grpo, "STD_DDOF", 0)
            patch.setattr(grpo, "EPSILON", 0.0)
        return build_batch(
            groups,
            build_algorithm(GrpoSettings(**algorithm)),
            now_step=now_step,
            lineage=lineage,
            max_lag=max_lag,
            settings=BatchSettings(micro_batch_tokens=budget, row_tokens=row_tokens, share_prompts=share),
            temperature=1.0,
            ranks=ranks,
        )


def group_of(*trajectories: Trajectory, seq: int = 1) -> TrajectoryGroup:
    return TrajectoryGroup(run="test", seq=seq, question=make_question(seq), trajectories=trajectories)


def tokens_of(batch: Batch) -> list[tuple[float, ...]]:
    """Every trained token as (trajectory, position, input before it, target, behaviour, advantage, weight, lag)."""
    out = []
    for m in batch.micro_batches:
        columns = (m.trajectory, m.positions.flat[m.index], m.ids.flat[m.index], m.targets, m.behaviour)
        out += zip(*columns, m.advantages, m.token_weights, m.lags, strict=True)
    return sorted(tuple(float(x) for x in token) for token in out)


def test_a_trajectory_becomes_inputs_and_the_tokens_that_they_predict():
    first, last = policy_segment([4, 5], [-0.1, -0.2]), policy_segment([9, 10], [-0.3, -0.4])
    segments = (prompt_segment([1, 2, 3]), first, observation_segment([6, 7, 8]), last)
    good = Trajectory(status=Status.ANSWERED, segments=segments, reward=1.0)
    batch = build([group_of(good, make_trajectory(0.0))], exact=True)
    (m,) = batch.micro_batches
    assert m.ids[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9], "the last token is only predicted"
    assert m.positions[0].tolist() == list(range(9))
    assert m.index[:4].tolist() == [2, 3, 7, 8], "logits at t predict t + 1; observations are not predicted"
    assert m.targets[:4].tolist() == [4, 5, 9, 10]
    np.testing.assert_allclose(m.behaviour[:4], [-0.1, -0.2, -0.3, -0.4], rtol=1e-6)
    np.testing.assert_allclose(m.advantages, [1, 1, 1, 1, -1, -1, -1, -1], rtol=1e-6)
    np.testing.assert_allclose(m.token_weights, 1 / 8)
    assert batch.num_tokens == 8


def test_what_follows_the_last_trained_token_is_not_read():
    segments = (prompt_segment([1, 2]), policy_segment([3, 4]), observation_segment([5, 6, 7]))
    cut = Trajectory(status=Status.TRUNCATED, segments=segments, reward=0.0)
    (m,) = build([group_of(cut, make_trajectory(1.0))], row_tokens=0, budget=9).micro_batches[1:]
    assert m.ids.tolist() == [[1, 2, 3]]


def test_a_trajectory_cut_off_by_truncation_is_read_to_its_end_where_the_algorithm_bootstraps():
    segments = (prompt_segment([1, 2]), policy_segment([3, 4]), observation_segment([5]), policy_segment([6, 7]))
    cut, whole = (Trajectory(status=s, segments=segments) for s in (Status.TRUNCATED, Status.ANSWERED))
    spent = Trajectory(status=Status.OUT_OF_TURNS, segments=segments)
    given = [group_of(whole, cut, spent)]
    plain = {"now_step": 0, "lineage": FIRST_START, "max_lag": 2, "temperature": 1.0}
    settings = BatchSettings(row_tokens=30)
    on, off = (
        build_batch(
            given, build_algorithm(PpoSettings(bootstrap_truncated=said)), settings=settings, **plain
        ).micro_batches[0]
        for said in (True, False)
    )
    assert off.ids.tolist() == [[1, 2, 3, 4, 5, 6] * 3] and set(off.end) == {-1}
    ends = {number: set(on.end[on.trajectory == number]) for number in (0, 1, 2)}
    (at,) = ends.pop(1)
    assert ends == {0: {-1}, 2: {-1}}, "answers and spent turns are ends"
    assert on.ids.size == 19 and on.ids.flat[at] == 7 and on.positions.flat[at] == 6
    assert on.document_ids.flat[at] == on.document_ids.flat[on.index[on.trajectory == 1][0]]
    over_four = build_batch(given, build_algorithm(PpoSettings()), settings=settings, ranks=4, **plain)
    (dummy,) = [m for share in over_four.rank_batches for m in share.minibatches[0] if not m.token_weights.any()]
    assert (dummy.end == -1).all()


def test_positions_and_documents_restart_in_each_trajectory_of_a_row():
    batch = build([make_group(1, (1.0, 0.0))], row_tokens=20)
    (m,) = batch.micro_batches
    assert m.ids.shape == (1, 18)
    assert m.positions.tolist() == [[*range(9), *range(9)]]
    assert m.document_ids.tolist() == [[0] * 9 + [1] * 9]
    assert m.index.tolist() == [2, 3, 7, 8, 11, 12, 16, 17]


def test_padding_belongs_to_no_document():
    batch = build([make_group(1, (1.0, 0.0)), make_group(2, (1.0, 0.0), length=5)])
    (m,) = batch.micro_batches
    assert (m.document_ids == -1).sum() == 2 * 3
    assert batch.stats["padding_share"] == pytest.approx(6 / 48)


def test_first_fit_decreasing_packs_the_textbook_example():
    assert pack_rows([4, 8, 1, 4, 2, 1], 10) == [[0, 3, 2, 5], [1, 4]], "4 4 1 1 and 8 2"
    assert pack_rows([3, 5], 0) == [[1], [0]], "capacity 0: a row each"
    assert pack_rows([12, 3], 10) == [[0], [1]], "longer than the capacity: a separate row"
    assert pack_rows([], 10) == []


def test_micro_batches_keep_to_the_budget_with_padding():
    assert cut_rows([10, 9, 8, 3, 3], 20) == [[0, 1], [2, 3], [4]]
    assert cut_rows([30, 5, 5], 20) == [[0], [1, 2]]


def test_the_order_of_groups_changes_nothing():
    groups = [make_group(s, (1.0, 0.0, 0.5), length=s) for s in (1, 2, 3, 4)]
    straight, shuffled = build(groups, row_tokens=40), build([groups[i] for i in (2, 0, 3, 1)], row_tokens=40)
    for a, b in zip(straight.micro_batches, shuffled.micro_batches, strict=True):
        for name in MicroBatch.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("row_tokens", "budget"), [(0, 1), (0, 4096), (30, 30), (64, 128), (1000, 1000)])
def test_packing_and_cutting_change_no_trained_token(row_tokens, budget, share):
    groups = [make_group(s, (1.0, 0.0, 0.5), length=7 * s) for s in (1, 2, 3)]
    assert tokens_of(build(groups, row_tokens=row_tokens, budget=budget, share=share)) == tokens_of(build(groups))


def behind(prompt: list[int], *rest: int, reward: float = 1.0) -> Trajectory:
    segments = (prompt_segment(prompt), policy_segment(rest, [-0.5] * len(rest)))
    return Trajectory(status=Status.ANSWERED, segments=segments, reward=reward)


def test_trajectories_of_a_group_share_their_prompt():
    group = group_of(behind([1, 2, 3], 4, 5), behind([1, 2, 3], 6, 7, 8, reward=0.0), behind([1, 2, 3], 9))
    batch = build([group], share=True)
    (m,) = batch.micro_batches
    assert m.ids.tolist() == [[1, 2, 3, 4, 6, 7]] and m.positions.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert m.document_ids.tolist() == [[0] * 6] and m.index.tolist() == [2, 3, 2, 4, 5, 2]
    assert m.targets.tolist() == [4, 5, 6, 7, 8, 9] and m.trajectory.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.stats["tokens_read"] == 6 and batch.stats["tokens_shared"] == 6 and not batch.stats["padding_share"]


def test_what_is_shared_ends_where_trajectories_differ_or_are_trained_and_fits_a_micro_batch():
    differ = group_of(behind([1, 2, 3], 4, 5), behind([1, 9, 3], 4, 5, reward=0.0))
    (m,) = build([differ], share=True).micro_batches
    assert m.ids.tolist() == [[1, 2, 3, 4, 9, 3, 4]] and m.positions.tolist() == [[0, 1, 2, 3, 1, 2, 3]]
    alike = group_of(behind([1, 2], 4, 5, 6), behind([1, 2], 4, 5, 7, reward=0.0))
    (m,) = build([alike], share=True).micro_batches
    assert m.ids.tolist() == [[1, 2, 4, 5, 4, 5]], "tokens that are trained are not shared"
    longer = group_of(behind([1, 2], 3, 4, 5), behind([1, 2, 3, 4], 6, reward=0.0))
    (m,) = build([longer], share=True).micro_batches
    assert m.ids.tolist() == [[1, 2, 3, 4, 3, 4]], "not even those that are trained in one of them only"
    other = group_of(behind([1, 2], 4), behind([3, 2], 4, reward=0.0))
    (m,) = build([other], share=True).micro_batches
    assert m.ids.tolist() == [[1, 2], [3, 2]], "nothing in common"
    group = group_of(*(behind([1, 2, 3], 4, 5, 6, reward=float(n)) for n in range(5)))
    rows = [m.ids.shape for m in build([group], share=True, budget=8).micro_batches]
    assert rows == [(1, 7), (1, 7), (1, 5)]


def test_tokens_beyond_max_lag_are_masked_and_counted():
    mixed = Segment(
        owner=Owner.POLICY,
        ids=[4, 5, 6, 7],
        logprobs=np.zeros(4, np.float32),
        spans=(VersionSpan(epoch=1, step=1, start=0, end=1), VersionSpan(epoch=1, step=3, start=1, end=4)),
    )
    t = Trajectory(status=Status.ANSWERED, segments=(prompt_segment([1, 2]), mixed), reward=1.0)
    fresh = make_trajectory(0.0, version=PolicyVersion(1, 4))
    batch = build([group_of(t, fresh)], now_step=4, max_lag=2)
    assert batch.num_tokens == 3 + 4
    assert batch.stats["tokens_stale"] == 1
    assert batch.stats["lag_max"] == 1
    assert batch.stats["lag_mean"] == pytest.approx(3 / 7)
    stale = [m.targets[m.trajectory == 0].tolist() for m in batch.micro_batches]
    assert stale == [[5, 6, 7]]


def test_a_token_at_max_lag_is_trained():
    batch = build([make_group(1, (1.0, 0.0), version=PolicyVersion(1, 2))], now_step=4, max_lag=2)
    assert batch.num_tokens == 8
    assert batch.stats["lag_max"] == 2


def test_tokens_of_an_abandoned_branch_are_masked_and_counted():
    lineage = (PolicyVersion(1, 0), PolicyVersion(2, 3))  # the second learner resumed at step 3
    lost, kept = (
        make_group(1, (1.0, 0.0), version=PolicyVersion(1, 4)),
        make_group(2, (1.0, 0.0), version=PolicyVersion(1, 3)),
    )
    batch = build([lost, kept], now_step=4, lineage=lineage)
    assert batch.num_tokens == 8
    assert batch.stats["tokens_orphan"] == 8
    assert batch.stats["tokens_stale"] == 0


def test_an_invalid_trajectory_is_masked_and_counts_in_no_baseline():
    failed = make_trajectory(1.0, status=Status.FAILED)
    batch = build([group_of(make_trajectory(1.0), make_trajectory(0.0), failed)], exact=True)
    assert batch.num_tokens == 8
    assert batch.stats["tokens_invalid"] == 4
    assert sorted(set(np.concatenate([m.advantages for m in batch.micro_batches]).tolist())) == [-1.0, 1.0]


def test_a_batch_in_which_nothing_is_trained_has_no_micro_batches():
    batch = build([group_of(make_trajectory(1.0, status=Status.STALE))])
    assert batch.micro_batches == ()
    assert batch.num_tokens == 0
    assert build([]).num_tokens == 0


def test_the_first_token_of_a_trajectory_is_never_trained():
    t = Trajectory(status=Status.ANSWERED, segments=(policy_segment([5, 6, 7]),), reward=1.0)
    batch = build([group_of(t, make_trajectory(0.0))])
    assert [token[3] for token in tokens_of(batch) if token[0] == 0] == [6, 7]


def test_token_weights_follow_their_formulas():
    assert trajectory_weights([3, 1], "token_mean").tolist() == [0.25, 0.25]
    assert trajectory_weights([4, 1, 0], "seq_mean_token_mean").tolist() == [1 / 8, 1 / 2, 0.0]
    assert trajectory_weights([4, 1, 0], "seq_mean_token_sum", 100).tolist() == [1 / 200, 1 / 200, 0.0]
    assert trajectory_weights([4, 1], "seq_mean_token_sum").tolist() == [1 / 2, 1 / 2]
    assert trajectory_weights([0, 0], "token_mean").tolist() == [0.0, 0.0]


def test_every_rank_gets_as_many_micro_batches_and_one_with_too_few_trajectories_dummies():
    batch = build([make_group(s, (1.0, 0.0), length=9) for s in range(1, 6)], budget=1, ranks=4)
    hands = [share.minibatches[0] for share in batch.rank_batches]
    assert [len(hand) for hand in hands] == [3, 3, 3, 3]
    assert sum(bool(m.token_weights.any()) for hand in hands for m in hand) == 10, "ten trajectories, each alone"
    assert len(batch.micro_batches) == 10
    few = build([make_group(1, (1.0, 0.0))], ranks=4)
    assert [len(share.minibatches[0]) for share in few.rank_batches] == [1, 1, 1, 1]
    assert len(build([], ranks=3).rank_batches) == 3


@pytest.mark.parametrize(("row_tokens", "budget"), [(0, 60), (60, 120), (64, 64)])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_balancing_over_ranks_changes_no_trained_token(row_tokens, budget, ranks):
    groups = [make_group(s, (1.0, 0.0, 0.5), length=3 + 5 * s % 17) for s in range(1, 9)]
    options = {"row_tokens": row_tokens, "budget": budget, "minibatches": 2}
    balanced, alone = build(groups, ranks=ranks, **options), build(groups, **options)
    assert tokens_of(balanced) == tokens_of(alone), "weights and advantages too"
    for part, whole in zip(balanced.minibatches, alone.minibatches, strict=True):
        assert sorted({n for m in part for n in m.trajectory}) == sorted({n for m in whole for n in m.trajectory})
    assert balanced.stats["rank_balance"] > 0.8


def test_every_part_has_its_own_update_and_its_own_denominators():
    given = [make_group(s, (1.0, 0.0), length=s) for s in range(1, 6)]
    batch = build(given, minibatches=2)
    assert len(batch.minibatches) == 2
    for part, seqs in zip(batch.minibatches, ((1, 3, 5), (2, 4)), strict=True):
        assert sum(float(m.token_weights.sum()) for m in part) == pytest.approx(1, abs=1e-5)
        tokens = sum(t.num_sampled for s in seqs for t in given[s - 1].trajectories)
        assert sum(len(m.targets) for m in part) == tokens
    assert batch.num_tokens == sum(len(m.targets) for m in batch.micro_batches)
    assert [len(share.minibatches) for share in build(given, minibatches=2, ranks=3).rank_batches] == [2, 2, 2]
    assert len(build(given[:1], minibatches=4).minibatches) == 1, "a part without groups is no update"


def test_rewards_stand_where_they_were_earned():
    first, last = policy_segment([4, 5]), policy_segment([9, 10])
    first = first.model_copy(update={"reward": 0.25})
    segments = (prompt_segment([1, 2, 3]), first, observation_segment([6, 7, 8]), last)
    (m,) = build(
        [group_of(Trajectory(status=Status.ANSWERED, segments=segments, reward=1.0), make_trajectory(0.0))]
    ).micro_batches
    assert m.rewards[:4].tolist() == [0, 0.25, 0, 0.75]
    assert m.rewards[4:].tolist() == [0] * 4
    assert m.turn[:4].tolist() == [0, 0, 1, 1]


def test_a_reward_on_a_token_that_is_not_trained_moves_to_the_one_before_it():
    old, new = PolicyVersion(1, 0), PolicyVersion(1, 5)
    fresh, stale = policy_segment([4, 5], version=new), policy_segment([9, 10], version=old)
    ends_stale = Trajectory(
        status=Status.TRUNCATED, segments=(prompt_segment([1]), fresh, observation_segment([6]), stale), reward=2.0
    )
    starts_stale = Trajectory(
        status=Status.TRUNCATED,
        segments=(prompt_segment([1]), stale.model_copy(update={"reward": 0.5}), observation_segment([6]), fresh),
        reward=2.0,
    )
    (m,) = build([group_of(ends_stale, starts_stale)], now_step=5).micro_batches
    found = {int(n): m.rewards[m.trajectory == n].tolist() for n in (0, 1)}
    assert found == {0: [0, 2], 1: [0.5, 1.5]}, "to its last trained token; to its first"


def test_the_reward_of_a_segment_is_not_that_of_the_token_behind_it():
    first = policy_segment([4, 5]).model_copy(update={"reward": 0.25})
    together = Trajectory(
        status=Status.ANSWERED, segments=(prompt_segment([1]), first, policy_segment([9, 10])), reward=1.0
    )
    (m,) = build([group_of(together)]).micro_batches
    assert m.rewards.tolist() == [0, 0.25, 0, 0.75]


def test_turns_can_have_advantages_of_their_own():
    def two_turns(early: float, late: float) -> Trajectory:
        first = policy_segment([4, 5]).model_copy(update={"reward": early})
        segments = (prompt_segment([1]), first, observation_segment([6]), policy_segment([9]))
        return Trajectory(status=Status.ANSWERED, segments=segments, reward=early + late)

    group = group_of(two_turns(1.0, 0.0), two_turns(0.0, 2.0))
    (m,) = build([group], turns="turn", exact=True).micro_batches
    found = {int(n): m.advantages[m.trajectory == n].tolist() for n in (0, 1)}
    # turn 0: +1 and -1, turn 1: -1 and +1, each turn counting what follows it
    assert found == {0: [0.0, 0.0, -1.0], 1: [0.0, 0.0, 1.0]}
    (m,) = build([group], turns="turn", turn_gamma=0.5, exact=True).micro_batches
    assert {int(n): m.advantages[m.trajectory == n].tolist() for n in (0, 1)} == {
        0: [0.5, 0.5, -1.0],
        1: [-0.5, -0.5, 1.0],
    }


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "max_rl", "pass_at_k"])
def test_every_estimator_prefers_the_better(estimator):
    (m,) = build([make_group(1, (1.0, 0.0, 0.0))], estimator=estimator).micro_batches
    best = {int(n): float(m.advantages[m.trajectory == n][0]) for n in range(3)}
    assert best[0] > 0 >= best[1] == best[2]


def test_rewards_of_tokens_can_be_scaled_by_all_that_was_seen():
    algorithm = build_algorithm(PpoSettings(reward_scale="running"))

    def rewards(*groups: TrajectoryGroup) -> list[float]:
        batch = build_batch(
            groups, algorithm, now_step=0, lineage=(), max_lag=2, settings=BatchSettings(), temperature=1.0
        )
        return sorted({round(float(r), 4) for m in batch.micro_batches for r in m.rewards})

    assert rewards(make_group(9, (9.0, 0.0))) == [0.0, 2.0], "the deviation is 4.5; the batch is skipped"
    assert rewards(make_group(1, (4.0, 0.0))) == [0.0, 2.0], "the deviation is 2"
    algorithm.after_update()
    assert rewards(make_group(2, (4.0, 0.0, 2.0, 2.0))) == [0.0, 1.2247, 2.4495], "of six: sqrt(8 / 3)"
    again = build_algorithm(PpoSettings(reward_scale="running"))
    again.load(algorithm.state())
    assert again.state() == algorithm.state()


def test_shuffled_rewards_are_those_of_tokens_too():
    given = [make_group(s, (1.0, 0.0, 0.0, 0.0)) for s in range(1, 9)]
    settings = BatchSettings(shuffle_rewards=True)
    batch = build_batch(
        given, build_algorithm(GrpoSettings()), now_step=3, lineage=(), max_lag=9, settings=settings, temperature=1.0
    )
    found = {int(n): 0.0 for m in batch.micro_batches for n in m.trajectory}
    for m in batch.micro_batches:
        for number, reward in zip(m.trajectory, m.rewards, strict=True):
            found[int(number)] += float(reward)
    assert sum(found.values()) == 8
    assert [found[n] for n in range(32)] != [float(n % 4 == 0) for n in range(32)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    row_tokens=st.sampled_from([0, 16, 64]),
    budget=st.integers(1, 300),
)
def test_every_sampled_token_is_trained_once_in_a_sound_row(lengths, row_tokens, budget):
    group = group_of(
        *(
            Trajectory(
                status=Status.ANSWERED,
                segments=(prompt_segment([1, 2]), policy_segment(range(3, 3 + n))),
                reward=float(i % 2),
            )
            for i, n in enumerate(lengths)
        )
    )
    batch = build([group], row_tokens=row_tokens, budget=budget)
    assert batch.num_tokens == sum(lengths)
    assert sorted((t[0], t[3]) for t in tokens_of(batch)) == [
        (i, 3 + k) for i, n in enumerate(lengths) for k in range(n)
    ]
    for m in batch.micro_batches:
        assert m.ids.size <= budget or len(m.ids) == 1
        starts = np.diff(m.document_ids, axis=1, prepend=-2) != 0
        assert ((m.positions == 0) == starts | (m.document_ids < 0)).all(), "0 where a document starts, and in padding"
        assert (m.document_ids.flat[m.index] >= 0).all()


def test_the_shuffled_control_trains_on_other_advantages_and_reports_the_true_reward():
    groups = [make_group(seq, (1.0, 1.0, 0.0, 0.0)) for seq in range(1, 9)]
    true, control = (
        build_batch(
            groups,
            build_algorithm(GrpoSettings()),
            now_step=3,
            lineage=FIRST_START,
            max_lag=3,
            settings=BatchSettings(shuffle_rewards=shuffle),
            temperature=1.0,
        )
        for shuffle in (False, True)
    )
    assert control.stats["reward_mean"] == true.stats["reward_mean"] == 0.5
    assert sorted(tokens_of(control)) != sorted(tokens_of(true))
