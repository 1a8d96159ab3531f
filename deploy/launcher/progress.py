"""Step lines for the launcher's console, from the records that the learner appends to `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECENT = 20
"""Number of steps for rates and the remaining time."""
TAIL_BYTES = 256 * 1024
RENAMED = {"em_mean": "reward/em", "length_mean": "response_length_mean"}
"""Former field name -> present name, for runs that an earlier version started."""


def parse_record(line: str | bytes) -> Any:
    """Parse one line of a `metrics.jsonl`, with present field names. Raises ValueError if it is not JSON."""
    record = json.loads(line)
    return {RENAMED.get(k, k): v for k, v in record.items()} if isinstance(record, dict) else record


class StepTail:
    """Read records appended to `path` since the last call, at first since construction, or all of them if `whole`."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not whole else 0
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
            self.last = record
            yield record


@dataclass(frozen=True)
class RunHistory:
    """The recent steps of a run from `metrics.jsonl`, whether or not it is running.

    last     values of the newest step, {} before the first
    recent   records of the newest epoch, the newest last, at most RECENT
    """

    last: Mapping[str, float] = field(default_factory=dict)
    recent: tuple[Mapping[str, Any], ...] = ()

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
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return RunHistory()
    records: list[dict[str, Any]] = []
    for line in reversed(lines):
        try:
            record = parse_record(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or len(records) == RECENT:
            break
        if records and record.get("epoch") != records[0].get("epoch"):
            break
        records.append(record)
    if not records:
        return RunHistory()
    last = {name: float(value) for name, value in records[0].items() if isinstance(value, int | float)}
    return RunHistory(last, tuple(reversed(records)))
