"""Groups of the last steps are trained again, on purpose and beside the accounting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import BatchConditions, all_locations, frames
from learner.checkpoint.replay import replay
from learner.config.learner import LearnerSettings, MixSettings
from learner.data.replay_buffer import ReplayBuffer, ReplayedGroup
from protocol.header import seal
from protocol.messages import Task
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support import tiny_learner
from tests.support.messages import make_group

Serve = Callable[..., int]


def past(steps: int, lag: int = 0) -> list[ReplayedGroup]:
    """Of each step two groups, which began `lag` steps before the version that the step updated."""
    return [
        ReplayedGroup(step, make_group(10 * step + n, version=PolicyVersion(1, max(0, step - 1 - lag))))
        for step in range(1, steps + 1)
        for n in (1, 2)
    ]


def drawn(mix: ReplayBuffer, now_step: int) -> list[tuple[int, int]]:
    return [(t.step, t.group.seq) for t in mix.sample(now_step, [])]


def test_only_groups_within_the_lag_bound_are_drawn() -> None:
    everything = ReplayBuffer(100, 3, 0, past(9))
    assert drawn(everything, 9) == [(s, 10 * s + n) for s in (7, 8, 9) for n in (1, 2)]
    assert drawn(ReplayBuffer(100, 3, 0, past(9, lag=2)), 9) == [(9, 91), (9, 92)]
    assert drawn(ReplayBuffer(100, 0, 0, past(9)), 9) == []
    assert [t.group.seq for t in everything.sample(9, [make_group(91)])] == [71, 72, 81, 82, 92]


def test_the_draw_follows_from_seed_step_and_what_was_trained() -> None:
    grown = ReplayBuffer(3, 4, 7)
    for step, group in past(9):
        grown.add(step, [group])
    again = ReplayBuffer(3, 4, 7, past(9)[6:])
    assert drawn(grown, 9) == drawn(again, 9) and len(drawn(grown, 9)) == 3
    others = {tuple(drawn(ReplayBuffer(3, 4, seed, past(9)), 9)) for seed in range(20)}
    assert len(others) > 10


def test_mixed_groups_are_booked_once_and_drawn_alike_after_a_crash(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any]
) -> None:
    settings = settings.model_copy(update={"replay_mix": MixSettings(share=0.5)})
    run = run.model_copy(update={"max_lag": 4})

    def die(updates: int) -> None:
        if updates == 5:
            raise tiny_learner.Crash

    def fresh(task: Task, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        # As from rollout servers that wait for every version: the credit gate alone lets them run ahead.
        return seal(make_group(task.seq, run=run.id, version=PolicyVersion(1, (task.seq - 1) // 4)))

    with tiny_learner.Player(address, run.id, spoil=fresh):
        with pytest.raises(tiny_learner.Crash):
            serve(run, settings, before=die)
        assert serve(run, settings) == 0
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found and found.facts["ledger"]["counts"]["trained"] == 32 == found.facts["tally"]["taken"]
    lines = {line["step"]: line for line in tiny_learner.step_lines(run.dir)}
    assert lines[1]["replayed_groups"] == 0 and lines[8]["replayed_groups"] == 2
    assert lines[8]["trajectories"] == 6 * 4, "four new groups and two old ones"
    batches = tiny_learner.surviving(run.dir)
    for location, frame in frames(all_locations(run.dir / "journal")):
        for step, seq in BatchConditions.from_plain(frame["batch"]).mixed:
            assert step < location.step
            assert location.epoch == 1 or seq in batches[step], "the mix knows nothing of the lost steps"
    # A replay mixes what was mixed: the same weights.
    mine = run.model_copy(update={"dir": run.dir.parent / "replay"})
    replay(mine, settings, run.dir, make_engine=lambda r, s: tiny_learner.TinyEngine(r, s))
    states = [Checkpoints(r.checkpoint_dir, 2).load().path / "state" / "tiny.json" for r in (run, mine)]  # type: ignore[union-attr]
    assert states[0].read_text() == states[1].read_text()


def test_a_mix_needs_a_journal() -> None:
    with pytest.raises(ValueError, match="needs journal: true"):
        LearnerSettings(replay_mix=MixSettings(share=0.5), journal=False)
