"""The interface of trackers, and the run information that they receive."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import UserError
from protocol.settings import RunSettings, Settings


@dataclass(frozen=True)
class RunInfo:
    """Information about the run for trackers.

    id          run id: the same after every resume, so that a tracker continues its record
    directory   run directory, where trackers keep their files
    first_step  first step to be logged: previously logged steps from here on were rolled back by a crash
    config      dotted key -> value, without secrets
    """

    id: str
    directory: Path
    first_step: int
    config: Mapping[str, str | int | float | bool]

    @classmethod
    def of(cls, run: RunSettings, learner: Settings, *, first_step: int, epoch: int) -> RunInfo:
        """Return the information on `run`, without its Redis URL, which may contain a password."""
        sections = {
            "run": run.model_dump(mode="json", exclude={"redis_url"}),
            "learner": learner.model_dump(mode="json"),
        }
        config = dict(_flat(sections)) | {"epoch": epoch}
        return cls(run.id, run.dir, first_step, config)


class Tracker(Protocol):
    """Receives the metrics of a run. All calls come from one thread, which is not the training thread.

    Any call may raise or hang: `learner.observability.trackers.fanout.Trackers` isolates training from that.
    """

    name: str

    def open(self, facts: RunInfo) -> None:
        """Start the record of the run, or continue an existing one."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step, all finite."""
        ...

    def close(self) -> None:
        """Flush and close. Called once, only after `open` has succeeded."""
        ...


def require_package(module: str, package: str) -> Any:
    """Return the imported `module`. Raises UserError with the install command if `package` is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"learner.trackers needs {package}, which cannot be imported",
            why=str(error),
            todo=f"pip install {package}, or remove it from learner.trackers",
        ) from error


def _flat(value: Any, path: str = "") -> list[tuple[str, str | int | float | bool]]:
    if isinstance(value, dict):
        return [item for name, below in value.items() for item in _flat(below, f"{path}.{name}" if path else str(name))]
    return [(path, value if isinstance(value, str | int | float | bool) else str(value))]
