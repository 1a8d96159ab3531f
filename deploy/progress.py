"""One line a step on the launcher's console, from what the learner appends to `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from learner.progress import WORDS, StepFacts


class StepTail:
    """Reads what was appended to `path` since the last look; starts at the end of what is there already."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self.last: dict[str, Any] = {}

    def read(self) -> Iterator[dict[str, Any]]:
        """Each new complete record; a line that is still being written is left for the next look."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                # a learner that was killed left half a line; the next one wrote on behind it
                continue
            self.last = record
            yield record


def last_figures(path: Path) -> dict[str, float]:
    """The numbers of the newest step in `path`, {} before the first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        return {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return {}


def format_step(record: Mapping[str, Any], *, steps: int) -> str:
    """The learner's own line for a step: reward, EM, lag, tokens/s and the bottleneck in words."""

    def number(name: str) -> float:
        # what was not finite is null in JSON
        return float(record.get(name) or 0.0)

    # the file calls `wait` what the learner's own words call `data`
    seconds = {"data" if n == "wait" else n: float(s or 0.0) for n, s in (record.get("seconds") or {}).items()}
    return StepFacts(
        step=int(record["step"]),
        steps=steps,
        reward=number("reward_mean"),
        em=number("em_mean"),
        lag_mean=number("lag_mean"),
        lag_max=number("lag_max"),
        sampled=int(number("tokens_generated")),
        trained=int(number("tokens_trained")),
        total_s=number("step_s"),
        seconds=dict.fromkeys(WORDS, 0.0) | {n: s for n, s in seconds.items() if n in WORDS},
    ).line()
