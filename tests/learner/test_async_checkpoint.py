"""Checkpoints written in the background: training goes on, only the snapshot is acknowledged, a kill loses nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

import learner.checkpoint.checkpoint as checkpoint_files
from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from learner.delivery.store import RunStore
from protocol.errors import Fenced
from protocol.keys import Keys
from protocol.settings import RunSettings
from tests.learner.test_loop import assert_exactly_once, manifest
from tests.support.tiny_learner import Player, TinyEngine

Serve = Callable[..., int]
FAULTS = ("snapshot", "writing", "rename", "acknowledge")


def die(*_: object, **__: object) -> Any:
    """End like a process whose machine lost power."""
    os.kill(os.getpid(), signal.SIGKILL)


def install(fault: str) -> None:
    """Kill this process at a point of the checkpoint of step 3."""
    if fault == "snapshot":
        snapshot = TinyEngine.snapshot_state
        TinyEngine.snapshot_state = lambda self, at: (die if self.updates == 3 else snapshot)(self, at)
    elif fault == "writing":
        train, trained = TinyEngine.train, threading.Event()

        def count(self: TinyEngine, batch: Any) -> Any:
            report = train(self, batch)
            if self.updates == 5:
                trained.set()
            return report

        def half(self: TinyEngine, directory: Path) -> None:
            (directory / "tiny.json").write_text("[3, 1.")
            assert trained.wait(60), "training waits for the checkpoint"
            die()

        TinyEngine.train, TinyEngine.save_state = count, half
    elif fault == "rename":
        write = checkpoint_files.atomic_write
        checkpoint_files.atomic_write = lambda path, *rest, **more: (die if path.name == "CURRENT" else write)(
            path, *rest, **more
        )
    else:
        acknowledge = RunStore.ack
        RunStore.ack = lambda self, ids: (die if ids else acknowledge)(self, ids)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_learner_killed_during_a_checkpoint_trains_each_seq_once(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acknowledged: Counter[bytes] = Counter()
    ack = RunStore.ack

    def note(store: RunStore, ids: list[bytes]) -> int:
        acknowledged.update(ids)
        return ack(store, ids)

    child = os.fork()
    if child == 0:
        install(fault)
        serve(run, settings)
        os._exit(1)
    with Player(address, run.id):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = Checkpoints(run.checkpoint_dir, 2).load()
        assert (found.facts["step"] if found else 0) == (3 if fault == "acknowledge" else 0)
        monkeypatch.setattr(RunStore, "ack", note)
        assert serve(run, settings) == 0
    assert len(acknowledged) == 32 and set(acknowledged.values()) == {1}, "also what the killed learner had trained"
    facts = assert_exactly_once(run)
    assert facts["lineage"] == ([[1, 0], [2, 3]] if fault == "acknowledge" else [[2, 0]])
    assert not list(run.checkpoint_dir.glob(".step_*")), "what the killed learner was writing is removed"


class SlowDisk:
    """The state of step 3 is not written before `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.snapshots: dict[int, list[float]] = {}
        save, snapshot = TinyEngine.save_state, TinyEngine.snapshot_state

        def wait(engine: TinyEngine, directory: Path) -> None:
            if engine.updates == 3:
                assert self.release.wait(60), "training waits for the checkpoint"
            save(engine, directory)

        def note(engine: TinyEngine, directory: Path) -> Callable[[], None]:
            self.snapshots[engine.updates] = [engine.updates, *engine.weights.tolist()]
            return snapshot(engine, directory)

        monkeypatch.setattr(TinyEngine, "save_state", wait)
        monkeypatch.setattr(TinyEngine, "snapshot_state", note)


def test_training_goes_on_and_only_the_snapshot_is_acknowledged(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, keys, current = SlowDisk(monkeypatch), Keys(run.id), run.checkpoint_dir / "CURRENT"
    acknowledged: list[tuple[str, int]] = []
    waiting: list[int] = []
    ack = RunStore.ack

    def note(store: RunStore, ids: list[bytes]) -> int:
        if ids:
            acknowledged.append((current.read_text().strip(), len(ids)))
        return ack(store, ids)

    def look(updates: int) -> None:
        if updates == 5:  # steps 4 and 5 were trained meanwhile
            assert not current.exists()
            waiting.append(db.xpending(keys.traj, "learner")["pending"])
            disk.release.set()

    monkeypatch.setattr(RunStore, "ack", note)
    with Player(address, run.id):
        assert serve(run, settings.model_copy(update={"keep_checkpoints": 9}), before=look) == 0
    assert waiting[0] >= 20, "nothing is acknowledged before its checkpoint is in force"
    assert acknowledged == [("step_3.e1", 12), ("step_6.e1", 12), ("step_8.e1", 8)]
    for step, numbers in disk.snapshots.items():
        saved = json.loads((run.checkpoint_dir / f"step_{step}.e1" / "state" / "tiny.json").read_text())
        assert saved == numbers and saved[0] == step
    assert sorted(disk.snapshots) == [3, 6, 8]
    assert_exactly_once(run)


def test_a_learner_fenced_while_it_writes_commits_nothing(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, rival = SlowDisk(monkeypatch), RunStore(run.redis_url, run.id)

    def lose(updates: int) -> None:
        if updates == 4:
            assert rival.acquire("rival:1:2:3", 1, 60_000, takeover=True) == 2
            disk.release.set()

    with Player(address, run.id), pytest.raises(Fenced):
        serve(run, settings, before=lose)
    rival.close()
    assert not (run.checkpoint_dir / "CURRENT").exists()


def test_a_signal_while_a_checkpoint_is_written_ends_with_the_last_step_in_one(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)

    def stop(updates: int) -> None:
        if updates == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.2, disk.release.set).start()

    with Player(address, run.id):
        assert serve(run, settings, before=stop) == 143
        assert manifest(run)["step"] == 5
        assert serve(run, settings) == 0
    assert assert_exactly_once(run)["lineage"] == [[1, 0], [2, 5]]


def test_a_synchronous_checkpoint_takes_no_snapshot(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    saved_after: list[float] = []

    def look(updates: int) -> None:
        if updates == 3:
            saved_after.append(manifest(run)["step"])

    threading.Timer(0.2, disk.release.set).start()
    begun = time.monotonic()
    with Player(address, run.id):
        assert serve(run, settings.model_copy(update={"async_checkpoints": False}), before=look) == 0
    assert saved_after == [3] and time.monotonic() > begun + 0.2
    assert disk.snapshots == {}
    assert_exactly_once(run)
