"""Disks that are really full (a small file system, or a limit on the size of files): what stops, what goes on, what
is said, and that nothing half-written is left."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
import yaml

from learner import cli, recovery
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from learner.config.learner import LearnerSettings
from protocol.codec import decode_as
from protocol.errors import ForayError, UserError
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot, WeightUpdate
from protocol.settings import RunSettings
from tests.support import tiny_learner

BYTES = 4 << 20
PADDING = b"s" * 300_000
"""What a checkpoint or a version holds besides: larger than the limit of files where no file system can be mounted."""


class Disk:
    """The file system of one folder: `fill` leaves no room there, `free` gives it back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", str(folder)]
        self.mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(PADDING) // 2, self._limits[1]))
            return
        with (self.folder / ".filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"f" * 4096)
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        (self.folder / ".filler").unlink(missing_ok=True)

    def close(self) -> None:
        self.free()
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def disk() -> Iterator[Callable[[Path], Disk]]:
    made: list[Disk] = []

    def make(folder: Path) -> Disk:
        made.append(Disk(folder))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def heavy_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of a third of a megabyte."""
    save = tiny_learner.TinyEngine.save_state

    def padded(self: Any, directory: Path) -> None:
        save(self, directory)
        (directory / "padding").write_bytes(PADDING)

    monkeypatch.setattr(tiny_learner.TinyEngine, "save_state", padded)


@pytest.fixture
def heavy_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of a third of a megabyte."""
    weights = tiny_learner.TinyEngine.iter_weights

    def padded(self: Any, device: str = "cpu") -> Any:
        yield from weights(self, device)
        yield "padding", torch.ones(len(PADDING) // 4)

    monkeypatch.setattr(tiny_learner.TinyEngine, "iter_weights", padded)


def reported(db: redis.Redis, run: RunSettings) -> MetricsSnapshot | None:
    raw = db.get(Keys(run.id).metrics("learner", "0"))
    return decode_as(MetricsSnapshot, raw) if raw else None


def test_what_is_full_is_really_full(disk: Callable[[Path], Disk], tmp_path: Path) -> None:
    one = disk(tmp_path / "d")
    one.fill()
    with pytest.raises(OSError, match=r"No space left|File too large"):
        (tmp_path / "d" / "x").write_bytes(PADDING)
    (tmp_path / "d" / "x").unlink()
    one.free()
    (tmp_path / "d" / "x").write_bytes(PADDING)


@pytest.mark.slow
@pytest.mark.fault(41)
def test_without_disk_space_for_checkpoints_training_continues_then_issuing_stops_until_there_is_space(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    db: redis.Redis, disk: Callable[[Path], Disk], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    heavy_states: None,
) -> None:  # fmt: skip
    monkeypatch.setattr(recovery, "RETRY_CHECKPOINT_S", 0.2)
    full = disk(run.checkpoint_dir)
    steps_when_full: list[int] = []
    seen: dict[str, Any] = {}

    def fill(updates: int) -> None:
        if not steps_when_full and (run.checkpoint_dir / "CURRENT").exists():
            full.fill()
            steps_when_full.append(updates)
        elif steps_when_full:
            steps_when_full.append(updates)

    def watch() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = reported(db, run)
            if now is not None and now.values.get("checkpoint_failures", 0) >= recovery.FAILED_CHECKPOINTS + 1:
                current = Checkpoints(run.checkpoint_dir, 2).load()
                seen.update(values=now.values, text=now.text, step=current.facts["step"] if current else -1)
                seen["litter"] = list(run.checkpoint_dir.glob(".step_*"))
                full.free()
                return
            time.sleep(0.05)

    longer = run.model_copy(update={"steps": 16})
    watcher = threading.Thread(target=watch)
    watcher.start()
    with tiny_learner.Player(address, run.id):
        assert serve(longer, settings.model_copy(update={"checkpoint_every": 2}), before=fill) == 0
    watcher.join()
    first = steps_when_full[0]
    assert 2 <= seen["step"] <= first, "the old one is in force and can be loaded"
    assert steps_when_full[:2] == [first, first + 1], "training went on"
    most = first + 7 + run.max_lag  # two steps until it is due, two in which it fails, two more failures
    assert seen["values"]["issued"] <= most * run.groups_per_step, "and then nothing more was issued"
    assert "could not be written" in seen["text"]["checkpoint_error"]
    assert (
        f"{recovery.FAILED_CHECKPOINTS} checkpoints failed: issuing tasks is paused until one succeeds" in caplog.text
        and caplog.text.count("issuing tasks is paused") == 1
        and f"step {seen['step']} remains current" in caplog.text
    )
    last = reported(db, run)
    assert last and last.values["checkpoint_failures"] == 0 and last.values["trained"] == 16 * run.groups_per_step
    kinds = [fields[b"kind"] for _, fields in db.xrange(Keys(run.id).events)]
    assert b"checkpoint-failed" in kinds and b"checkpoint-again" in kinds


@pytest.mark.fault(41)
@pytest.mark.parametrize("freed_after", [2, None])
def test_the_last_checkpoint_is_tried_again_and_the_run_ends_if_there_is_space_by_then(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    disk: Callable[[Path], Disk], monkeypatch: pytest.MonkeyPatch, heavy_states: None, freed_after: int | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(recovery, "RETRY_CHECKPOINT_S", 0.2)
    full, failures, wait = disk(run.checkpoint_dir), [], recovery.CheckpointRetry.wait

    def fill(updates: int) -> None:
        if updates == run.steps - 1:
            full.fill()

    def watched(self: recovery.CheckpointRetry, stopping: Callable[[], bool]) -> bool:
        failures.append(self.failures)
        if self.failures == freed_after:
            full.free()
        return wait(self, stopping)

    monkeypatch.setattr(recovery.CheckpointRetry, "wait", watched)
    only_last = settings.model_copy(update={"checkpoint_every": 100})
    with tiny_learner.Player(address, run.id):
        if freed_after is None:
            with pytest.raises(UserError, match="the last checkpoint could not be written"):
                serve(run, only_last, before=fill)
            full.free()
            assert failures == [1, 2, 3] and serve(run, only_last) == 0
        else:
            assert serve(run, only_last, before=fill) == 0 and failures == [1, 2]
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found and found.facts["step"] == run.steps


@pytest.mark.fault(10, 41)
@pytest.mark.parametrize("freed_after", [2, None])
def test_a_signal_on_a_full_disk_is_no_orderly_end_and_the_current_step_is_named(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    disk: Callable[[Path], Disk], monkeypatch: pytest.MonkeyPatch, heavy_states: None, freed_after: int | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(recovery, "RETRY_CHECKPOINT_S", 0.2)
    # the checkpoint of step 3 is whole before the disk is full
    settings = settings.model_copy(update={"async_checkpoints": False})
    full, wait = disk(run.checkpoint_dir), recovery.CheckpointRetry.wait

    def stop(updates: int) -> None:
        if updates == 5:
            full.fill()
            os.kill(os.getpid(), signal.SIGTERM)

    def watched(self: recovery.CheckpointRetry, stopping: Callable[[], bool]) -> bool:
        if self.failures == freed_after:
            full.free()
        return wait(self, stopping)

    monkeypatch.setattr(recovery.CheckpointRetry, "wait", watched)
    with tiny_learner.Player(address, run.id):
        if freed_after is None:
            with pytest.raises(ForayError, match=r"step 6 without a checkpoint of it: that of step 3 is") as caught:
                serve(run, settings, before=stop)
            assert not isinstance(caught.value, UserError), "exit code 1"
        else:
            assert serve(run, settings, before=stop) == 143
    full.free()
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found and found.facts["step"] == (6 if freed_after else 3)


@pytest.mark.fault(42)
def test_without_room_for_weights_the_learner_stops_and_the_last_version_stays_whole(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    db: redis.Redis, disk: Callable[[Path], Disk], heavy_versions: None,
) -> None:  # fmt: skip
    full = disk(run.weights_dir)
    with tiny_learner.Player(address, run.id):
        with pytest.raises(UserError, match=r"cannot write the weights of version 1\.5.*(space|large)") as caught:
            serve(run, settings, before=lambda updates: full.fill() if updates == 4 else None)
        assert "free disk space" in caught.value.todo and str(run.dir) in caught.value.todo
        target = decode_as(WeightUpdate, db.hget(Keys(run.id).target, "b"))
        assert target.version == (1, 4) and Path(target.path, "manifest.json").is_file()
        assert not list(run.weights_dir.glob(".v*")) and not (run.weights_dir / "v1.5").exists()
        full.free()
        assert serve(run, settings) == 0


@pytest.mark.fault(41)
def test_without_room_for_the_journal_the_learner_stops_and_what_is_written_can_be_read(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    disk: Callable[[Path], Disk],
) -> None:  # fmt: skip
    full = disk(run.dir / "journal")
    if not full.mounted:
        pytest.skip("the journal of this run is smaller than any limit on files: it needs a separate file system")
    with tiny_learner.Player(address, run.id):
        with pytest.raises(UserError, match=r"cannot write step 5 to the journal.*No space left") as caught:
            serve(run, settings, before=lambda updates: full.fill() if updates == 4 else None)
        assert "free disk space" in caught.value.todo
        full.free()
        assert serve(run, settings) == 0
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found
    kept = [entry.step for entry in read_journal(run.dir / "journal", lineage=found.lineage)]
    assert kept == [step for step in range(1, run.steps + 1) for _ in range(run.groups_per_step)]


@pytest.mark.fault(39, 41)
def test_without_room_for_evidence_training_goes_on(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    disk: Callable[[Path], Disk], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    full = disk(run.dir / "skipped")
    if not full.mounted:
        pytest.skip("the files are smaller than any limit on files: the test needs a separate file system")
    full.fill()
    calls: list[int] = []

    def verdict(updates: int) -> str:
        calls.append(updates)
        return "not finite" if len(calls) == 3 else ""

    with tiny_learner.Player(address, run.id):
        assert serve(run, settings, verdict=verdict) == 0
    assert "could not save the skipped batch" in caplog.text


@pytest.mark.fault(41)
def test_without_disk_space_at_the_start_it_reports_that_and_leaves_nothing(
    run: RunSettings, settings: LearnerSettings, disk: Callable[[Path], Disk], db: redis.Redis, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    full = disk(run.dir)
    if not full.mounted:
        pytest.skip("the key of a run is smaller than any limit on files: it needs a separate file system")
    full.fill()
    tree = {"run": json.loads(run.model_dump_json()), "learner": {"questions": str(settings.questions)}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    assert cli.main(["--config", str(tmp_path / "c.yaml")]) == 2
    said = capsys.readouterr().err
    assert "error: the disk is full: [Errno 28] No space left on device" in said and "do: free disk space" in said
    assert [p.name for p in run.dir.iterdir() if p.name != ".filler"] == []
    assert not db.exists(Keys(run.id).lease)
