"""What the learner measured: seconds by cause, numbers of the last step, rates. Read each second by the I/O thread."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.messages import MetricsSnapshot

log = logging.getLogger(__name__)

RATE_WINDOW_S = 30.0
MAX_NAME, MAX_TEXT = 200, 500


class Meter:
    """Thread-safe. `waits` are seconds since the start, by cause: data, publish, checkpoint, redis, compute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._waits = dict.fromkeys(("data", "compute", "publish", "checkpoint", "redis"), 0.0)
        self._values: dict[str, float] = {}
        self._text: dict[str, str] = {"state": "starting", "bottleneck": ""}
        self._tokens: deque[tuple[float, int]] = deque([(self._start, 0)])

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Books the seconds spent inside under `cause`."""
        begun = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._waits[cause] += time.monotonic() - begun

    def seconds(self) -> dict[str, float]:
        """Seconds by cause so far."""
        with self._lock:
            return dict(self._waits)

    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def put(self, **values: float) -> None:
        """Sets numbers; what is not finite is left out, since a snapshot may not carry it."""
        with self._lock:
            self._values.update({k[:MAX_NAME]: float(v) for k, v in values.items() if math.isfinite(v)})

    def say(self, **text: str) -> None:
        """Sets texts (state, bottleneck)."""
        with self._lock:
            self._text.update({k: v[:MAX_TEXT] for k, v in text.items()})

    def trained(self, tokens: int) -> None:
        """Books trained tokens for the rate."""
        with self._lock:
            self._tokens.append((time.monotonic(), tokens))

    def snapshot(self, learner_id: str, **values: float) -> MetricsSnapshot:
        """Everything as a message; `values` are added to the numbers that were put."""
        with self._lock:
            now = time.monotonic()
            while len(self._tokens) > 1 and self._tokens[0][0] < now - RATE_WINDOW_S:
                self._tokens.popleft()
            span = max(now - max(self._tokens[0][0], now - RATE_WINDOW_S), 1e-3)
            rate = sum(n for _, n in self._tokens) / span
            numbers = self._values | {k: float(v) for k, v in values.items()} | {"tokens_trained_per_s": rate}
            return MetricsSnapshot(
                process="learner",
                id=learner_id,
                uptime_s=now - self._start,
                values=numbers,
                waits=dict(self._waits),
                text=dict(self._text),
            )


class StepLog:
    """`metrics.jsonl`: one line a step, each with the step's epoch. A resumed learner appends; of two lines for one
    step, the one with the higher epoch survived.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def append(self, facts: dict[str, Any]) -> None:
        """One line. What a full disk does not take is kept in memory and written with a later one."""
        self._file.write(json.dumps(_finite(facts), separators=(",", ":")) + "\n")
        try:
            self._file.flush()
        except OSError as error:
            log.error("metrics.jsonl could not be written, and will be when there is room: %s", error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.error("the last lines of metrics.jsonl are lost: %s", error)


def _finite(value: Any) -> Any:
    """`value` with what JSON cannot say (nan, inf) as null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
