"""Two sides that never run at one speed: who is ahead waits, within bounds, and without burning the processor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from learner.config.learner import LearnerSettings
from protocol.codec import decode_as
from protocol.keys import TASK_GROUP, Keys
from protocol.messages import MetricsSnapshot
from protocol.settings import RunSettings
from tests.support import tiny_learner

Serve = Callable[..., int]


class Gauge:
    """Looks at a run's streams all the time, from outside."""

    def __init__(self, db: redis.Redis, run: str) -> None:
        self._db, self._keys = db, Keys(run)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.groups: list[int] = []
        """Entries of the trajectory stream, at each look: read or not, none of them is acknowledged."""

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.groups.append(self._db.xlen(self._keys.traj))


@pytest.mark.fault(48)
def test_rollouts_that_are_faster_than_the_learner_are_held_back_and_redis_stays_small(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    run = run.model_copy(update={"steps": 12})
    with tiny_learner.Player(address, run.id) as player, Gauge(db, run.id) as gauge:
        assert serve(run, settings, pace_s=0.08) == 0
    lines = tiny_learner.step_lines(run.dir)
    assert max(line["lag_max"] for line in lines) <= run.max_lag
    # what waits to be trained, what the checkpoint that is being written contains, and what was trained since
    most = (run.max_lag + 1 + 2 * settings.checkpoint_every) * run.groups_per_step
    assert max(gauge.groups) > run.groups_per_step, "it was ahead"
    assert max(gauge.groups) <= most < run.steps * run.groups_per_step
    assert len(player.seen) == run.steps * run.groups_per_step and db.xlen(Keys(run.id).traj) == 0


@pytest.mark.fault(49)
def test_a_learner_faster_than_its_rollouts_waits_reports_it_and_does_not_spin(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    def slow(task: Any, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        time.sleep(0.1)
        return header, body

    few = run.model_copy(update={"steps": 4})
    began, burnt = time.monotonic(), time.process_time()
    with tiny_learner.Player(address, run.id, spoil=slow):
        assert serve(few, settings) == 0
    took, burnt = time.monotonic() - began, time.process_time() - burnt
    waits = decode_as(MetricsSnapshot, db.get(Keys(run.id).metrics("learner", "0"))).waits
    assert waits["data"] > 0.5 * 16 * 0.1, "it reports what it waited for"
    assert took > 16 * 0.1 and burnt < 0.7 * took, f"{burnt:.2f} s of processor time in {took:.2f} s"
    assert db.xpending(Keys(run.id).tasks, TASK_GROUP)["pending"] == 0
