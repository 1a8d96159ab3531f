"""One line a step on the launcher's console, from what the learner appends to `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
