"""Measurements of the learner: seconds by cause, values of the last step, rates. The I/O thread reads them each
second."""

from __future__ import annotations

import copy
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from learner.observability.metric_table import LEARNER
from protocol.messages import MetricsSnapshot
from protocol.runtime.metrics import Histogram

log = logging.getLogger(__name__)

RATE_WINDOW_S = 30.0
MAX_NAME, MAX_TEXT = 200, 500


class Meter:
    """Collects measurements. Thread-safe. `waits`: seconds since the start by cause (data, publish, checkpoint, redis,
    compute, validation)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._waits = dict.fromkeys(("data", "compute", "publish", "checkpoint", "redis", "validation"), 0.0)
        self._open: dict[str, tuple[int, float]] = {}
        """cause -> (number of waits, start of the first one)"""
        self._values: dict[str, float] = {}
        self._step: dict[str, float] = {}
        """Values of the last step; the next step replaces all of them."""
        self._text: dict[str, str] = {"state": "starting", "bottleneck": ""}
        self._trained: deque[tuple[float, int, int]] = deque([(self._start, 0, 0)])
        """(when, tokens, groups) of steps"""
        self._histograms: dict[str, Histogram] = {}

    @contextmanager
    def blocked_on(self, cause: str) -> Iterator[None]:
        """Count the seconds inside the context under `cause`, continuously; overlapping waits count once."""
        with self._lock:
            count, since = self._open.get(cause, (0, 0.0))
            self._open[cause] = (count + 1, since if count else time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                count, since = self._open.pop(cause)
                if count > 1:
                    self._open[cause] = (count - 1, since)
                else:
                    self._waits[cause] += time.monotonic() - since

    def seconds(self) -> dict[str, float]:
        """Return seconds by cause so far, including waits in progress."""
        with self._lock:
            return self._waits_until(time.monotonic())

    def _waits_until(self, now: float) -> dict[str, float]:
        """Return the waits at one clock reading, so that no cause grows faster than the snapshot's uptime."""
        going_on = {cause: now - since for cause, (_, since) in self._open.items()}
        return {cause: total + going_on.get(cause, 0.0) for cause, total in self._waits.items()}

    def uptime_s(self) -> float:
        """Return seconds since the start."""
        return time.monotonic() - self._start

    def set(self, **values: float) -> None:
        """Set values; non-finite values are dropped, because snapshots cannot contain them."""
        with self._lock:
            self._values.update(_sendable(values))

    def set_step(self, values: Mapping[str, float]) -> None:
        """Replace the values of the previous step; non-finite values are dropped."""
        with self._lock:
            self._step = _sendable(values)

    def set_text(self, **text: str) -> None:
        """Set texts (state, bottleneck)."""
        with self._lock:
            self._text.update({k: v[:MAX_TEXT] for k, v in text.items()})

    def trained(self, tokens: int, groups: int) -> None:
        """Count a step for the rates."""
        with self._lock:
            self._trained.append((time.monotonic(), tokens, groups))

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add a value to the histogram `name` of `learner.observability.metric_table`, measured `times` times."""
        with self._lock:
            self._histograms.setdefault(name, Histogram(LEARNER[name].buckets)).observe(value, times)

    def histograms(self) -> dict[str, Histogram]:
        """Return the current state of the non-empty histograms."""
        with self._lock:
            return copy.deepcopy(self._histograms)

    def snapshot(self, learner_id: str, **values: float) -> MetricsSnapshot:
        """Return everything as a message; `values` override the values that were set, and those override the step's."""
        with self._lock:
            now = time.monotonic()
            while len(self._trained) > 1 and self._trained[0][0] < now - RATE_WINDOW_S:
                self._trained.popleft()
            span = max(now - max(self._trained[0][0], now - RATE_WINDOW_S), 1e-3)
            numbers = self._step | self._values | {k: float(v) for k, v in values.items()}
            numbers["tokens_trained_per_s"] = sum(tokens for _, tokens, _ in self._trained) / span
            numbers["groups_trained_per_s"] = sum(groups for _, _, groups in self._trained) / span
            return MetricsSnapshot(
                process="learner",
                id=learner_id,
                uptime_s=now - self._start,
                values=numbers,
                waits=self._waits_until(now),
                text=dict(self._text),
            )


class StepTimer:
    """Times steps, in total and by cause. Work after a step's end, such as a checkpoint, counts towards the next
    one."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.start()

    def start(self) -> None:
        """Start the current step now."""
        self._began, self._before = time.monotonic(), self._meter.seconds()

    def lap(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of the step that ends now, in total and by cause, and start the next one."""
        began, before = self._began, self._before
        self.start()
        return self._began - began, {k: v - before[k] for k, v in self._before.items()}


def _sendable(values: Mapping[str, float]) -> dict[str, float]:
    return {k[:MAX_NAME]: float(v) for k, v in values.items() if math.isfinite(v)}


class StepLog:
    """`metrics.jsonl`: one line per step, with the step's epoch. A resumed learner appends; of two lines for one
    step, the one with the higher epoch survived.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if not whole:  # a killed learner left half a line
            self._file.write("\n")

    def append(self, facts: dict[str, Any]) -> None:
        """Append one line. If the disk is full, it is kept in memory and written with a later one."""
        self._file.write(json.dumps(_finite(facts), separators=(",", ":")) + "\n")
        try:
            self._file.flush()
        except OSError as error:
            log.error("could not write metrics.jsonl, will retry with the next step: %s", error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.error("the last lines of metrics.jsonl are lost: %s", error)


def _finite(value: Any) -> Any:
    """Return `value` with nan and inf as null, and floats rounded: six digits after the point, or six
    significant digits below 1, such as a learning rate of 1e-6."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, 6) if abs(value) >= 1 else float(f"{value:.6g}")
    return value
