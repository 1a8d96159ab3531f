"""The reader of what the learner writes of its steps: `metrics.jsonl` and `validation.jsonl`.

The launcher's console and every view of a run read these files here, so that all show the same steps and values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.validation.results import ValidationFiles

RECENT, PAST = 20, 100
"""Number of steps for rates and the remaining time, and for the comparison of a run with its own best steps."""
TAIL_BYTES, WHOLE = 1024 * 1024, 1 << 62
"""Bytes to read from the end of the file."""
RENAMED = {"em_mean": "reward/em", "length_mean": "response_length_mean"}
"""Former field name -> present name, for runs that an earlier version started."""


def parse_record(line: str | bytes) -> Any:
    """Parse one line of a `metrics.jsonl`, with present field names. Raises ValueError if it is not JSON."""
    record = json.loads(line)
    return {RENAMED.get(k, k): v for k, v in record.items()} if isinstance(record, dict) else record


class StepTail:
    """Read records appended to `path` since the last call, at first since construction, or its last `start` bytes."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self._path = path
        self._offset = max(0, path.stat().st_size - start) if path.exists() else 0
        self.last: dict[str, Any] = {}

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield each new complete record; an incomplete line is read by the next call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            try:
                record = parse_record(line)
            except ValueError:
                # a killed learner left half a line, and the next one appended to it
                continue
            if isinstance(record, dict):
                self.last = record
                yield record


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name: `seconds/wait` for {"seconds": {"wait": ...}}."""
    found: dict[str, float] = {}
    for name, value in record.items():
        parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: part for key, part in parts.items() if isinstance(part, int | float) and math.isfinite(part)}
    return found


class StepRecords:
    """The records of a `metrics.jsonl` by step, ascending, without rolled-back steps and half lines.

    shape  applied to each record before it is kept
    """

    def __init__(self, path: Path, *, last_bytes: int = WHOLE, shape: Callable[[dict[str, Any]], Any] = dict) -> None:
        self._path, self._last_bytes, self._shape = path, last_bytes, shape
        self._tail, self._size = StepTail(path, start=last_bytes), 0
        self.by_step: dict[int, Any] = {}

    def update(self) -> None:
        """Read what was appended since the last call."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._size:  # the file of another run has taken its place
            self._tail, self.by_step = StepTail(self._path, start=self._last_bytes), {}
        self._size = size
        for record in self._tail.read():
            if isinstance(step := record.get("step"), int):
                while self.by_step and next(reversed(self.by_step)) >= step:
                    # a learner that resumed from an earlier checkpoint trains the later steps again
                    self.by_step.popitem()
                self.by_step[step] = self._shape(record)


def read_steps(path: str | Path, last_bytes: int = WHOLE) -> dict[int, dict[str, Any]]:
    """Return step -> record of a `metrics.jsonl`, ascending, without rolled-back steps and half lines; {}: no file.

    path        the file
    last_bytes  read only this much of its end
    """
    steps = StepRecords(Path(path), last_bytes=last_bytes)
    steps.update()
    return steps.by_step


@dataclass(frozen=True)
class RunHistory:
    """The recent steps of a run from `metrics.jsonl`, whether or not it is running.

    last     values of the newest step, {} before the first
    recent   records of the newest epoch, the newest last, at most RECENT
    past     records of all epochs, the newest last, at most PAST
    """

    last: Mapping[str, float] = field(default_factory=dict)
    recent: tuple[Mapping[str, Any], ...] = ()
    past: tuple[Mapping[str, Any], ...] = ()

    @property
    def step_s(self) -> float:
        """Return the mean seconds per recent step, 0 if there is none."""
        return self.mean("step_s") or 0.0

    @property
    def trained_per_s(self) -> float | None:
        """Return tokens trained per second in the recent steps, None if there is none."""
        seconds = sum(float(r.get("step_s") or 0.0) for r in self.recent)
        return sum(float(r.get("tokens_trained") or 0.0) for r in self.recent) / seconds if seconds else None

    def values(self, name: str) -> list[float]:
        """Return a field of the recent steps that have it, the newest last."""
        return [float(r[name]) for r in self.recent if isinstance(r.get(name), int | float)]

    def mean(self, name: str) -> float | None:
        """Return the mean of a field over the recent steps that have it, None if none has."""
        values = self.values(name)
        return sum(values) / len(values) if values else None


def read_history(path: Path) -> RunHistory:
    """Read the end of a `metrics.jsonl`. Return an empty history if there is none."""
    past = list(read_steps(path, TAIL_BYTES).values())[-PAST:]
    if not past:
        return RunHistory()
    records = past[-RECENT:]
    return RunHistory(
        numbers(records[-1]), tuple(r for r in records if r.get("epoch") == records[-1].get("epoch")), tuple(past)
    )


def read_validations(directory: Path) -> dict[str, dict[int, float]]:
    """Return validation/SUITE/METRIC -> step -> value, from `validation.jsonl`; of one step the later line counts."""
    found: dict[str, dict[int, float]] = {}
    for record in ValidationFiles(directory).records():
        for suite, means in record["suites"].items():
            for name, value in means.items():
                found.setdefault(f"validation/{suite}/{name}", {})[int(record["step"])] = float(value)
    return found


def read_curves(directory: Path) -> dict[str, dict[int, float]]:
    """Return field -> step -> value of a run: the numbers of its steps, and its validations."""
    found: dict[str, dict[int, float]] = {}
    for step, record in read_steps(directory / "metrics.jsonl").items():
        for name, value in numbers(record).items():
            found.setdefault(name, {})[step] = value
    return found | read_validations(directory)
