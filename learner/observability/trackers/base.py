"""The interface of trackers, and what they are given when a run starts."""

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
    """What a tracker is given of the run.

    id          of the run: the same after every resume, so that a tracker goes on with the record it has
    directory   of the run, where trackers keep their files
    first_step  that will be logged: after a crash, steps from here on that were logged before are rolled back
    config      dotted key -> value, secrets left out
    """

    id: str
    directory: Path
    first_step: int
    config: Mapping[str, str | int | float | bool]

    @classmethod
    def of(cls, run: RunSettings, learner: Settings, *, first_step: int, epoch: int) -> RunInfo:
        """Return the facts of `run`. Its Redis URL is left out, since that may hold a password."""
        sections = {
            "run": run.model_dump(mode="json", exclude={"redis_url"}),
            "learner": learner.model_dump(mode="json"),
        }
        config = dict(_flat(sections)) | {"epoch": epoch}
        return cls(run.id, run.dir, first_step, config)


class Tracker(Protocol):
    """Takes the numbers of a run. All calls come from one thread, which is not the training thread.

    Any of them may raise or hang: `learner.observability.trackers.fanout.Trackers` sees to it that training does not.
    """

    name: str

    def open(self, facts: RunInfo) -> None:
        """Begin the record of the run, or go on with the one there is."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one step, all finite."""
        ...

    def close(self) -> None:
        """Write out what is left. Called once, only after `open` has succeeded."""
        ...


def require_package(module: str, package: str) -> Any:
    """Return the imported `module`; UserError with the line to install `package` when there is none."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"learner.trackers asks for {package}, which cannot be imported",
            why=str(error),
            todo=f"pip install {package}, or leave it out of learner.trackers",
        ) from error


def _flat(value: Any, path: str = "") -> list[tuple[str, str | int | float | bool]]:
    if isinstance(value, dict):
        return [item for name, below in value.items() for item in _flat(below, f"{path}.{name}" if path else str(name))]
    return [(path, value if isinstance(value, str | int | float | bool) else str(value))]
