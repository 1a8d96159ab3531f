"""One line a step, made from the lines that the learner appends to `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WORDS = {
    "wait": "generation (the learner waits for trajectories)",
    "compute": "the learner (it computes)",
    "publish": "publishing weights",
    "checkpoint": "the checkpoint",
}
"""What a part of a step's seconds means for the reader who asks what to make faster."""


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
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            record = json.loads(line)
            self.last = record
            yield record


def bottleneck(seconds: Mapping[str, float]) -> str:
    """What most of the step's time went to, in words; "" where nothing was measured."""
    known = {name: value for name, value in seconds.items() if name in WORDS}
    return WORDS[max(known, key=lambda name: known[name])] if any(known.values()) else ""


def format_step(record: Mapping[str, Any], *, steps: int) -> str:
    """`step  12/150  reward 0.41  em 0.38  lag 0.8 (max 2)  trained 3,120 tok/s  1.9 s  bottleneck: ...`"""
    seconds = record.get("seconds") or {}
    parts = [f"step {int(record['step']):>4}/{steps}"]
    for name, label in (("reward_mean", "reward"), ("em_mean", "em")):
        if record.get(name) is not None:
            parts.append(f"{label} {record[name]:.3f}")
    if record.get("lag_mean") is not None:
        parts.append(f"lag {record['lag_mean']:.2f} (max {record.get('lag_max', 0):g})")
    took = sum(float(value) for value in seconds.values())
    for name, label in (("tokens_generated", "generated"), ("tokens_trained", "trained")):
        if record.get(name) is not None and took > 0:
            parts.append(f"{label} {record[name] / took:,.0f} tok/s")
    if took > 0:
        parts.append(f"{took:.1f} s")
    words = bottleneck(seconds)
    return "  ".join(parts) + (f"  bottleneck: {words}" if words else "")
