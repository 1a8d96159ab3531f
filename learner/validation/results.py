"""Results of validations, and the files that keep them.

validation.jsonl          one line per finished validation
validation/NAME.jsonl     its episodes, one line each, written when they end

NAME is that of the policy's checkpoint (step_25.e1), or `initial`. A validation that a crash has interrupted continues
with the episodes in its file.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.messages import Question
from protocol.runtime.episodes import Episode, is_failed, is_too_long
from protocol.runtime.files import atomic_write

log = logging.getLogger(__name__)

INITIAL = "initial"
COSTS = ("reward", "searches", "turns", "tokens_generated")
"""Fields of an episode that are averaged, besides its `metrics`."""
Suites = Mapping[str, Sequence[Question]]
Record = dict[str, Any]
"""name, step, epoch, version, checkpoint, seconds, suites: {suite: {metric: mean}}."""


@dataclass(frozen=True)
class ValidatedPolicy:
    """The policy of one validation. `name` as above; `checkpoint` is the name of its checkpoint, "" if it has none."""

    name: str
    step: int
    epoch: int
    version: str
    checkpoint: str = ""


def suite_means(questions: Sequence[Question], episodes: Iterable[Episode]) -> dict[str, float]:
    """Return the mean of each metric over the questions, each the mean of its valid episodes.

    Also `questions` and `failed` (without a valid episode), and `em_stderr`: the standard error of the mean of `em`.
    An episode whose prompt left no room for an answer counts as wrong.
    """
    by_question: dict[str, list[dict[str, float]]] = defaultdict(list)
    for episode in episodes:
        if not is_failed(episode):
            by_question[episode["question_id"]].append(_values(episode))
    found: dict[str, list[float]] = defaultdict(list)
    for values in by_question.values():
        for name in {name for one in values for name in one}:
            having = [one[name] for one in values if name in one]
            found[name].append(sum(having) / len(having))
    means = {name: sum(values) / len(values) for name, values in sorted(found.items())}
    means |= {"questions": float(len(questions)), "failed": float(len(questions) - len(by_question))}
    if (exact := found.get("em")) and len(exact) > 1:
        variance = sum((value - means["em"]) ** 2 for value in exact) / (len(exact) - 1)
        means["em_stderr"] = math.sqrt(variance / len(exact))
    return means


def _values(episode: Episode) -> dict[str, float]:
    costs = {} if is_too_long(episode) else {name: float(episode[name]) for name in COSTS if name in episode}
    return {name: float(value) for name, value in episode.get("metrics", {}).items()} | costs


def overall(record: Record, metric: str) -> float | None:
    """Return the mean of `metric` over the suites of a record that have it; None if none has."""
    values = [means[metric] for means in record["suites"].values() if metric in means]
    return sum(values) / len(values) if values else None


def best_of(records: Sequence[Record], metric: str) -> Record | None:
    """Return the record with the highest overall `metric` (ties: the first)."""
    scored = [(value, record) for record in records if (value := overall(record, metric)) is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def describe(record: Mapping[str, Any]) -> str:
    """Return one line: the step, and em and f1 of each suite."""
    parts = []
    for name, means in record["suites"].items():
        scores = [f"{metric} {means[metric]:.3f}" for metric in ("em", "f1") if metric in means]
        failed = f"{means['failed']:.0f} of {means['questions']:.0f} questions failed" if means["failed"] else ""
        parts.append(" ".join(part for part in (name, *scores, failed) if part))
    return f"step {record['step']}: {', '.join(parts)}"


class ValidationFiles:
    """The files in the run directory. Every method raises OSError if the disk fails."""

    def __init__(self, run_dir: Path) -> None:
        self._index, self._folder = run_dir / "validation.jsonl", run_dir / "validation"

    def records(self) -> list[Record]:
        """Return the finished validations, in order."""
        return _lines(self._index)

    def add(self, record: Record) -> None:
        """Add a finished validation, unless it is there already. Durable."""
        records = [one for one in self.records() if one["name"] != record["name"]]
        text = "".join(json.dumps(one) + "\n" for one in (*records, record))
        atomic_write(self._index, text, durable=True)

    def unfinished(self) -> list[str]:
        """Return the names of validations that were begun and not finished."""
        done = {record["name"] for record in self.records()}
        return sorted(path.stem for path in self._folder.glob("*.jsonl") if path.stem not in done)

    def discard(self, name: str) -> None:
        """Remove the episodes of a validation that cannot continue."""
        self.path(name).unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        """Return the file of the episodes of a validation."""
        return self._folder / f"{name}.jsonl"

    def episodes(self, name: str) -> list[Episode]:
        """Return the episodes of a validation so far, and leave out a line that was cut off by a crash."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self.path(name)
        found = _lines(path)
        raw = path.read_bytes() if path.exists() else b""
        if raw.count(b"\n") != len(found) or raw.rpartition(b"\n")[2]:
            atomic_write(path, "".join(json.dumps(one) + "\n" for one in found), durable=True)
        return found


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n"):
                found.append(json.loads(line))
        except ValueError:
            log.warning("ignoring a damaged line of %s", path)
    return found
