"""Runs every tracker in its own thread behind a bounded queue, so that no tracker stops or delays training.

loop           consumes             produces           waits for        unblocked by
_Lane._work    records of steps     calls of a tracker a record         the training thread, or `close`

A tracker that raises loses that record and is called again with the next one; a hanging tracker loses what exceeds its
queue. Both are counted, and logged once.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence

from learner.observability.trackers.base import Cell, RunInfo, StepDetail, Tracker

log = logging.getLogger(__name__)

QUEUE_STEPS = 1024
"""Steps that a tracker may lag behind before it loses some."""
REOPEN_S = 30.0
"""Seconds before retrying to open a tracker."""
RESERVED = frozenset({"step", "time", "timestamp", "project", "run"})
"""Names of Trackio's own columns."""
CLOSE_S = 15.0
"""Timeout for all trackers together to flush, in seconds."""


Record = tuple[int, dict[str, float], StepDetail | None, int]
"""Step, numbers, detail, rows of its table."""


class Trackers:
    """All trackers of a run, possibly none.

    tables  for each tracker: steps between two tables of trajectories (0: none), and their rows; missing: no tables
    """

    def __init__(self, trackers: Sequence[Tracker], facts: RunInfo, tables: Sequence[tuple[int, int]] = ()) -> None:
        shown = tables or [(0, 0)] * len(trackers)
        self._lanes = [_Lane(tracker, facts, *table) for tracker, table in zip(trackers, shown, strict=True)]

    def __bool__(self) -> bool:
        """Return whether there is a tracker."""
        return bool(self._lanes)

    def log(self, step: int, values: Mapping[str, object], detail: StepDetail | None = None) -> None:
        """Queue the numbers in `values` for every tracker, with dicts flattened, and `detail`. Returns immediately.

        The names `step` and `time` are dropped: Trackio reserves them, and every tracker receives the step.
        """
        if self._lanes:
            numbers = {name: value for name, value in _numbers(values).items() if name not in RESERVED}
            for lane in self._lanes:
                lane.put(step, numbers, detail)

    @property
    def dropped(self) -> int:
        """Return the number of records that trackers have lost so far."""
        return sum(lane.dropped for lane in self._lanes)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let the trackers flush for at most `timeout_s`, then abandon slow ones."""
        for lane in self._lanes:
            lane.end()
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.join(max(deadline - time.monotonic(), 0.0))


class _Lane:
    """One tracker. `dropped` is written by two threads, under the lock."""

    def __init__(self, tracker: Tracker, facts: RunInfo, every: int, rows: int) -> None:
        self._tracker, self._facts, self._every, self._rows = tracker, facts, every, rows
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_STEPS)
        self._lock = threading.Lock()
        self._opened, self._retry_at, self._complained = False, 0.0, False
        self.dropped = 0
        # a daemon: a hanging tracker must not block the end of the process
        self._thread = threading.Thread(target=self._work, name=f"tracker-{tracker.name}", daemon=True)
        self._ending = threading.Event()
        self._thread.start()

    def put(self, step: int, values: dict[str, float], detail: StepDetail | None) -> None:
        rows = self._rows if self._every and step % self._every == 0 else 0
        if detail is not None and not rows:
            detail = StepDetail(detail.lags, _no_rows)  # the groups of a step are large
        try:
            self._queue.put_nowait((step, values, detail, rows))
        except queue.Full:
            self._lose(f"is {QUEUE_STEPS} steps behind")

    def end(self) -> None:
        self._ending.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread checks the event after each record

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._lock:
                self.dropped += self._queue.qsize()
            log.warning("tracker %s did not finish in time and was abandoned", self._tracker.name)
        if self.dropped:
            log.warning("tracker %s lost %d steps; metrics.jsonl has them all", self._tracker.name, self.dropped)

    def _work(self) -> None:
        self._try_to_open()
        while (record := self._next()) is not None:
            step, values, detail, rows = record
            if not self._opened and time.monotonic() >= self._retry_at:
                self._try_to_open()
            if not self._opened:
                self._lose("is not open")
                continue
            try:
                self._tracker.log(step, values)
                if detail is not None:
                    self._tracker.show(step, detail, rows)
            except Exception as error:
                self._lose(f"failed: {error!r}")
        if self._opened:
            try:
                self._tracker.close()
            except Exception as error:
                log.warning("tracker %s could not be closed: %r", self._tracker.name, error)

    def _next(self) -> Record | None:
        if self._ending.is_set() and self._queue.empty():
            return None
        return self._queue.get()

    def _try_to_open(self) -> None:
        try:
            self._tracker.open(self._facts)
            self._opened = True
        except Exception as error:
            self._retry_at = time.monotonic() + REOPEN_S
            self._complain(f"could not be opened: {error!r}")

    def _lose(self, why: str) -> None:
        with self._lock:
            self.dropped += 1
        self._complain(why)

    def _complain(self, why: str) -> None:
        with self._lock:
            first, self._complained = not self._complained, True
        if first:
            log.warning("tracker %s %s; training continues (logged once)", self._tracker.name, why)


def _no_rows(count: int) -> list[list[Cell]]:
    return []


def _numbers(values: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[prefix + name] = float(value)
    return found
