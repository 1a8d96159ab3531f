"""One line a step on the launcher's console, from what the learner appends to `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECENT = 20
"""Steps that rates and the remaining time are taken from."""
TAIL_BYTES = 256 * 1024
RENAMED = {"em_mean": "reward/em", "length_mean": "response_length_mean"}
"""Fields of runs that an earlier version began -> their names since."""


def parse_record(line: str | bytes) -> Any:
    """Return one line of a `metrics.jsonl`, with the present names. ValueError for one that is not JSON."""
    record = json.loads(line)
    return {RENAMED.get(k, k): v for k, v in record.items()} if isinstance(record, dict) else record


class StepTail:
    """Reads what was appended to `path` since the last look; starts at the end of what is there already."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self.last: dict[str, Any] = {}

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield each new complete record; a line that is still being written is left for the next look."""
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
                # a learner that was killed left half a line; the next one wrote on behind it
                continue
            self.last = record
            yield record


@dataclass(frozen=True)
class RunHistory:
    """What `metrics.jsonl` says of a run, with or without its processes.

    last     numbers of the newest step, {} before the first
    recent   records of the newest steps, the newest last: of the newest epoch alone, at most RECENT
    """

    last: Mapping[str, float] = field(default_factory=dict)
    recent: tuple[Mapping[str, Any], ...] = ()

    @property
    def step_s(self) -> float:
        """Mean seconds per step of the recent steps, 0 where there is none."""
        return self.mean("step_s") or 0.0

    @property
    def trained_per_s(self) -> float | None:
        """Tokens trained per second in the recent steps, None where there is none."""
        seconds = sum(float(r.get("step_s") or 0.0) for r in self.recent)
        return sum(float(r.get("tokens_trained") or 0.0) for r in self.recent) / seconds if seconds else None

    def mean(self, name: str) -> float | None:
        """Return the mean of a number over the recent steps that have it; None where none has."""
        values = [float(r[name]) for r in self.recent if isinstance(r.get(name), int | float)]
        return sum(values) / len(values) if values else None


def read_history(path: Path) -> RunHistory:
    """Return the end of a `metrics.jsonl`; an empty history where there is none."""
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
