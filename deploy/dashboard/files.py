"""What a run's files say beside the journal: steps, validations and evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.launcher.progress import WHOLE, StepTail, keep_step
from learner.validation.results import ValidationFiles
from protocol.runtime.files import lineage_of

MOST_POINTS = 1500
"""Points of a curve that are sent; more steps are averaged in bins."""
RESULTS = ("result.json", "protocol.json")


class StepFile:
    """The records of `metrics.jsonl`, one per step: a step of a later epoch replaces that of an earlier one."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._tail = StepTail(path, start=WHOLE)
        self._steps: dict[int, dict[str, float]] = {}

    def update(self) -> None:
        """Read what was appended. Records are kept flat: `seconds/wait` for {"seconds": {"wait": ...}}."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._read:  # the file of another run has taken its place
            self._tail, self._steps = StepTail(self._path, start=WHOLE), {}
        self._read = size
        for record in self._tail.read():
            if isinstance(step := record.get("step"), int):
                keep_step(self._steps, step, _flat(record))

    @property
    def last(self) -> dict[str, float]:
        """Return the newest step, {} before the first."""
        return self._steps[next(reversed(self._steps))] if self._steps else {}

    def names(self) -> list[str]:
        """Return the fields of the newest steps."""
        return sorted({name for step in list(self._steps.values())[-50:] for name in step})

    def curves(self, names: Sequence[str]) -> dict[str, Any]:
        """Return `step` and the columns `names`, None where a step has no value, in at most MOST_POINTS points."""
        records = list(self._steps.values())
        width = max(1, -(-len(records) // MOST_POINTS))
        bins = [records[i : i + width] for i in range(0, len(records), width)]
        columns = {name: [_mean(name, part) for part in bins] for name in names}
        return {"step": [part[-1]["step"] for part in bins], "columns": columns, "width": width}


def _flat(record: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in record.items():
        parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        for key, part in parts.items():
            if isinstance(part, int | float) and math.isfinite(part):
                found[key] = part
    return found


def _mean(name: str, records: Sequence[Mapping[str, float]]) -> float | None:
    values = [record[name] for record in records if name in record]
    return sum(values) / len(values) if values else None


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the results of `foray eval` in the folder `evaluations` of the run directory, beside it or here, whose
    protocol names this run; the newest last.
    """
    lineage, found = lineage_of(run_dir), []
    for root in dict.fromkeys(p.resolve() for p in (run_dir, run_dir.parent, run_dir.parent.parent, Path())):
        for folder in sorted((root / "evaluations").glob("*/")):
            try:
                result, protocol = (json.loads((folder / name).read_text(encoding="utf-8")) for name in RESULTS)
                subject = dict(protocol["subject"])
                place = (root / str(subject.get("where"))).resolve()  # `where` is relative to the folder of --out
            except (OSError, ValueError, KeyError, TypeError):
                continue
            named = subject.get("lineage_id", "")
            ours = named == lineage if named and lineage else place.is_relative_to(run_dir.resolve())
            if root == run_dir.resolve() or ours:
                written = (folder / RESULTS[0]).stat().st_mtime
                found.append({"name": folder.name, "written": written, "result": result, "subject": subject})
    return sorted(found, key=lambda one: float(one["written"]))


def read_validations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the finished validations of a run, in order."""
    return ValidationFiles(run_dir).records()
