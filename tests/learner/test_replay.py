"""A journal is trained from again: the same policy from the same batches, another one from others."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from learner import cli
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import BatchConditions, GroupJournal, read_journal
from learner.checkpoint.replay import ReplayOptions, replay
from learner.config.learner import FilterSettings, LearnerSettings
from learner.config.trackers import TensorBoardSettings
from protocol.errors import UserError
from protocol.header import seal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support import tiny_learner
from tests.support.messages import make_group

Serve = Callable[..., int]


@pytest.fixture
def again(tmp_path: Path) -> Callable[..., RunSettings]:
    """Replays `source` into a new directory; further keyword arguments are the engine's."""

    def call(
        run: RunSettings, settings: LearnerSettings, source: Path, *, into: str = "replay", code: int = 0,
        how: ReplayOptions | None = None, **engine: Any,
    ) -> RunSettings:  # fmt: skip
        mine = run.model_copy(update={"dir": tmp_path / into, "redis_url": "", "id": "another"})
        made = lambda r, s: tiny_learner.TinyEngine(r, s, **engine)  # noqa: E731
        assert replay(mine, settings, source, how=how or ReplayOptions(), make_engine=made) == code
        return mine

    return call


def weights(run: RunSettings) -> list[float]:
    """Updates and weights of the tiny engine in the checkpoint in force."""
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found
    numbers: list[float] = json.loads((found.path / "state" / "tiny.json").read_text())
    return numbers


def write_journal(folder: Path, steps: int, *, rewards: Callable[[int], tuple[float, ...]] | None = None) -> None:
    """A run of `steps` steps of 4 groups, each step from the version before it."""
    with closing(GroupJournal(folder / "journal")) as journal:
        for step in range(1, steps + 1):
            version = PolicyVersion(1, step - 1)
            seqs = range(4 * step - 3, 4 * step + 1)
            given = [make_group(s, rewards(s) if rewards else (1.0, 0.0), version=version) for s in seqs]
            journal.append(
                step, 1, map(seal, given), BatchConditions(step - 1, (PolicyVersion(1, 0),), 1.0, len(given))
            )


def test_a_run_with_crashes_is_replayed_to_the_same_weights(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], again: Any
) -> None:
    settings = settings.model_copy(update={"on_orphan": "mask"})
    with tiny_learner.Player(address, run.id):
        for fatal in (2, 5):

            def die(updates: int, fatal: int = fatal) -> None:
                if updates == fatal:
                    raise tiny_learner.Crash

            with pytest.raises(tiny_learner.Crash):
                serve(run, settings, before=die, pace_s=0.05)
        serve(run, settings)
    mine = again(run, settings, run.dir, how=ReplayOptions(export=True))
    assert weights(mine) == weights(run)
    batches = [line["seqs"] for line in tiny_learner.step_lines(mine.dir)]
    assert batches == list(tiny_learner.surviving(run.dir).values())
    published = load_file(mine.weights_dir / "v1.8" / "model.safetensors")["weights"]
    assert published.tolist() == load_file(run.weights_dir / "v3.8" / "model.safetensors")["weights"].tolist()


def test_a_replay_that_was_broken_off_goes_on_where_it_was(
    run: RunSettings, settings: LearnerSettings, again: Any, tmp_path: Path
) -> None:
    write_journal(tmp_path / "old", 7)
    twice = ReplayOptions(passes=2)
    run = run.model_copy(update={"steps": 100})
    whole = again(run, settings, how=twice, source=tmp_path / "old", into="whole")
    assert weights(whole)[0] == 14

    def die(updates: int) -> None:
        if updates == 8:
            raise tiny_learner.Crash

    with pytest.raises(tiny_learner.Crash):
        again(run, settings, how=twice, source=tmp_path / "old", before=die)
    mine = again(run, settings, how=twice, source=tmp_path / "old")
    assert weights(mine) == weights(whole)
    assert list(tiny_learner.surviving(mine.dir)) == list(range(1, 15))
    assert again(run, settings, how=twice, source=tmp_path / "old") == mine, "started once more, there is nothing to do"
    with pytest.raises(UserError, match="another journal"):
        write_journal(tmp_path / "other", 8)
        again(run, settings, how=twice, source=tmp_path / "other")


@pytest.mark.fault(39)
def test_steps_that_are_finite_only_in_part_end_a_replay_that_can_go_on(
    run: RunSettings, settings: LearnerSettings, again: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(tmp_path / "old", 6)
    whole = again(run, settings, tmp_path / "old", into="whole")
    train = tiny_learner.TinyEngine.train

    def partly(self: tiny_learner.TinyEngine, batch: Any) -> tiny_learner.TinyReport:
        report = train(self, batch)
        report.reason = "not finite" if self.updates in (3, 4, 5) else ""
        return report

    monkeypatch.setattr(tiny_learner.TinyEngine, "train", partly)
    with pytest.raises(UserError, match="3 batches in a row were not trained in full"):
        again(run, settings, tmp_path / "old")
    mine = again(run, settings, tmp_path / "old")
    assert weights(mine) == weights(whole)
    assert [line["step"] for line in tiny_learner.step_lines(mine.dir)] == list(range(1, 7)), "none is repeated"


def test_a_signal_ends_a_replay_with_a_checkpoint(
    run: RunSettings, settings: LearnerSettings, again: Any, tmp_path: Path
) -> None:
    write_journal(tmp_path / "old", 7)

    def reported(updates: int) -> None:
        if updates == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = again(run, settings, tmp_path / "old", before=reported, code=143)
    assert weights(stopped)[0] == 5, "after the present step"
    whole = again(run, settings, tmp_path / "old", into="whole")
    assert weights(again(run, settings, tmp_path / "old")) == weights(whole)


def test_a_replay_ends_at_run_steps(
    run: RunSettings,
    settings: LearnerSettings,
    again: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_journal(tmp_path / "old", 7)
    mine = again(run.model_copy(update={"steps": 3}), settings, tmp_path / "old" / "journal")
    assert [line["seqs"] for line in tiny_learner.step_lines(mine.dir)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert [line["lag_max"] for line in tiny_learner.step_lines(mine.dir)] == [0, 0, 0], "as in the run"
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(shown) == 3 and all("trained" in line and "reward/em 0.500" in line for line in shown)
    assert not [line for line in shown if "generated" in line or "wait" in line], "nothing of that was measured"


def test_batches_can_be_regrouped_with_filtering(
    run: RunSettings, settings: LearnerSettings, again: Any, tmp_path: Path
) -> None:
    write_journal(tmp_path / "old", 7, rewards=lambda seq: (1.0, float(seq % 5 == 0)))
    run = run.model_copy(update={"groups_per_step": 9, "max_lag": 0})
    mine = again(run, settings, tmp_path / "old", how=ReplayOptions(passes=2, rebatch=True))
    lines = tiny_learner.step_lines(mine.dir)
    want = [list(range(1, 10)), list(range(10, 19)), list(range(19, 28))]
    assert [line["seqs"] for line in lines] == want * 2, "27 of 28 groups, twice"
    assert all(line["tokens_stale"] == 0 for line in lines) and lines[0]["lag_max"] == 2
    filtered = settings.model_copy(update={"filter": FilterSettings(metric="em")})
    how = ReplayOptions(passes=2, rebatch=True)
    mine = again(run, filtered, tmp_path / "old", into="filtered", how=how)
    teaching = [seq for seq in range(1, 29) if seq % 5]
    assert [line["seqs"] for line in tiny_learner.step_lines(mine.dir)] == [teaching[:9], teaching[9:18]] * 2


def test_a_batch_that_is_not_whole_is_left_out(
    run: RunSettings, settings: LearnerSettings, again: Any, tmp_path: Path
) -> None:
    write_journal(tmp_path / "old", 3)
    (data,) = (tmp_path / "old" / "journal").glob("*.bin")
    data.write_bytes(data.read_bytes()[:-9])
    mine = again(run, settings, tmp_path / "old")
    assert [line["seqs"] for line in tiny_learner.step_lines(mine.dir)] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_batches_that_are_not_finite_stop_a_replay_too(
    run: RunSettings, settings: LearnerSettings, again: Any, tmp_path: Path
) -> None:
    write_journal(tmp_path / "old", 7)
    with pytest.raises(UserError, match="3 batches in a row"):
        again(run, settings, tmp_path / "old", verdict=lambda n: "not finite" if n == 2 else "")


def test_what_cannot_be_replayed_is_refused(
    run: RunSettings, settings: LearnerSettings, again: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_journal(run.dir, 2)
    argv = [f"run.dir={run.dir}", f"run.model={run.model}"]
    assert cli.main([*argv, "--replay", str(run.dir)]) == 2
    assert "is the directory of the run that is replayed" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main([f"run.dir={tmp_path / 'x'}", "--replay", str(tmp_path / "empty")]) == 2
    assert "no journal found in" in capsys.readouterr().err
    again(run, settings, run.dir)
    assert len(list(read_journal(run.dir / "journal"))) == 8, "a replay journals nothing and changes nothing"


def test_a_run_does_not_go_on_from_a_replay_nor_a_replay_from_a_run(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], again: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    write_journal(tmp_path / "old", 2)
    with tiny_learner.Player(address, run.id):
        serve(run.model_copy(update={"steps": 1}), settings)
    with pytest.raises(UserError, match="checkpoints of a live run"):
        again(run, settings, tmp_path / "old", into="run")
    mine = again(run, settings, tmp_path / "old")
    with pytest.raises(UserError, match="is from a replay"):
        # an id that Redis does not know: under the old one the first run's lineage is refused before
        serve(run.model_copy(update={"dir": mine.dir, "id": "t2"}), settings)


def test_a_journal_that_lost_its_beginning_can_be_replayed(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], again: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with tiny_learner.Player(address, run.id):
        serve(run, settings.model_copy(update={"journal_max_gb": 1e-5}))
        serve(run.model_copy(update={"steps": 9}), settings)
    left = sorted({entry.step for entry in read_journal(run.dir / "journal")})
    assert left[0] > 1 and left == list(range(left[0], 10))
    with caplog.at_level(logging.WARNING):
        mine = again(run, settings, run.dir)
    assert f"the journal begins at step {left[0]}" in caplog.text
    assert len(tiny_learner.step_lines(mine.dir)) == min(len(left), 8)


def test_trackers_receive_every_step(run: RunSettings, settings: LearnerSettings, again: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_journal(tmp_path / "old", 3)
    mine = again(run, settings.model_copy(update={"trackers": (TensorBoardSettings(),)}), tmp_path / "old")
    reported = EventAccumulator(str(mine.dir / "tensorboard"))
    reported.Reload()
    assert [(e.step, e.value) for e in reported.Scalars("loss")] == [(1, 0.5), (2, 0.5), (3, 0.5)]
