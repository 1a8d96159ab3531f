"""Groups that teach nothing are left out, and the accounting is consistent all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import FilterSettings, LearnerSettings
from learner.data import filter as data_filter
from learner.data.filter import GroupFilter
from protocol.header import seal
from protocol.ledger import Ledger
from protocol.messages import Status, Task, TrajectoryGroup
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.messages import make_group

Serve = Callable[..., int]
EM = FilterSettings(metric="em")


def only(seqs: Callable[[int], bool]) -> Callable[[Task, bytes, bytes], tuple[bytes, bytes]]:
    """Groups whose trajectories all earn the same, but for those of `seqs`."""

    def spoil(task: Task, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        rewards = (1.0, 0.0, 0.0, 1.0) if seqs(task.seq) else (1.0,) * 4
        return seal(make_group(task.seq, rewards, run="t1"))

    return spoil


def ledger(run: RunSettings) -> Ledger:
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found
    return Ledger.from_state(found.facts["ledger"])


@pytest.mark.slow
def test_most_groups_have_no_signal_and_the_run_ends_with_consistent_accounting(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any]
) -> None:
    def die(updates: int) -> None:
        if updates == 5:
            raise tiny_learner.Crash

    settings = settings.model_copy(update={"filter": EM})
    run = run.model_copy(update={"max_lag": 20})
    with tiny_learner.Player(address, run.id, spoil=only(lambda seq: seq % 5 == 0)) as player:
        with pytest.raises(tiny_learner.Crash):
            serve(run, settings, before=die)
        assert serve(run, settings) == 0
    trained = [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]
    assert len(trained) == len(set(trained)) == 32 and all(seq % 5 == 0 for seq in trained)
    issued = max(seq for seq, _ in player.seen)
    found = ledger(run)
    left_out = set(range(1, issued + 1)) - set(trained)
    assert found.missing(issued) == [] and found.notes == {} and found.filtered.total() == len(left_out), "all settled"
    assert found.filtered["no_variance"] == sum(seq % 5 > 0 for seq in left_out)
    line = tiny_learner.step_lines(run.dir)[-1]
    assert line["groups_filtered_no_variance"] == found.filtered["no_variance"], "counted across the crash"


def test_a_policy_that_is_always_right_does_not_stand_still(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(data_filter, "PATIENCE", 2)
    settings = settings.model_copy(update={"filter": FilterSettings(metric="em")})
    with tiny_learner.Player(address, run.id, spoil=only(lambda seq: False)), caplog.at_level(logging.WARNING):
        assert serve(run.model_copy(update={"steps": 3}), settings) == 0
    assert [len(batch) for batch in tiny_learner.surviving(run.dir).values()] == [4, 4, 4]
    # the reader may have read a further batch while the filter paused for the first one
    assert ledger(run).filtered.total() in (2 * 2 * 4, 3 * 2 * 4), "two batches' worth were filtered before a step"
    assert caplog.text.count("filtering pauses until the next step") == 1


def group(rewards: tuple[float, ...], **more: Any) -> TrajectoryGroup:
    return make_group(1, rewards).model_copy(update=more)


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [((1.0, 0.0), True), ((1.0, 1.0), False), ((0.0, 0.0, 0.0), False), ((0.1 + 0.2, 0.3), False), ((1.0,), True)],
)
def test_a_group_has_a_signal_if_its_valid_rewards_differ(rewards: tuple[float, ...], kept: bool) -> None:
    assert GroupFilter(EM, 4).refuses(group(rewards)) is not kept
    assert not GroupFilter(FilterSettings(), 4).refuses(group(rewards)), "off unless a metric is named"


def test_patience_is_for_groups_in_a_row_and_lasts_until_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_filter, "PATIENCE", 2)
    made = GroupFilter(FilterSettings(metric="em"), 2)
    same, other = group((1.0, 1.0)), group((1.0, 0.0))
    assert [made.refuses(g) for g in (same, same, same, other)] == [True, True, True, False]
    assert [made.refuses(same) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [made.refuses(g) for g in (other, same)] == [False, False], "until a step is done"
    made.stepped()
    assert made.refuses(same)


def test_invalid_trajectories_do_not_affect_filtering() -> None:
    whole = group((1.0, 1.0, 0.0))
    *right, wrong = whole.trajectories
    failed = wrong.model_copy(update={"status": Status.FAILED})
    assert not GroupFilter(EM, 4).refuses(whole)
    assert GroupFilter(EM, 4).refuses(whole.model_copy(update={"trajectories": (*right, failed)}))


def test_the_metric_is_a_part_of_the_reward_or_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    shaped = group((1.0, 1.0))
    first, second = shaped.trajectories
    shaped = shaped.model_copy(update={"trajectories": (first, second.model_copy(update={"reward": 0.8}))})
    assert GroupFilter(EM, 4).refuses(shaped)
    assert not GroupFilter(FilterSettings(metric="reward"), 4).refuses(shaped)
    with caplog.at_level(logging.WARNING):
        assert not GroupFilter(FilterSettings(metric="emm"), 4).refuses(shaped), "a misspelt part loses nothing"
    assert "no reward named 'emm', using the whole reward; known: em" in caplog.text


def test_an_algorithm_may_ask_for_it(settings: LearnerSettings) -> None:
    assert settings.filtering.metric == ""
    dapo = LearnerSettings.model_validate({"algorithm": {"type": "dapo"}})
    assert dapo.filtering.metric == "reward"
    reported = LearnerSettings.model_validate({"algorithm": {"type": "dapo"}, "filter": {"metric": "em"}})
    assert reported.filtering.metric == "em"
