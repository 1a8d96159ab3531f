"""The interface of trackers, and the run information that they receive."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import UserError
from protocol.messages import Trajectory, TrajectoryGroup
from protocol.settings import RunSettings, Settings
from protocol.staleness import lag


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


Cell = str | int | float


@dataclass(frozen=True)
class StepDetail:
    """What trackers show of a step besides numbers.

    lags   lag in steps -> tokens of the policy with that lag
    rows   returns a given number of rows, one per trajectory, with the columns COLUMNS
    """

    lags: Mapping[int, int]
    rows: Callable[[int], Sequence[Sequence[Cell]]]


COLUMNS = ("step", "seq", "question", "answers", "answer", "reward", "status", "turns", "searches", "lag", "text")
"""Columns of a table of trajectories. `lag`: of its oldest token; -1 without tokens of the policy."""
TABLE, LAGS = "trajectories", "token_lag"
"""Names of the table and of the histogram of lags."""


def histogram_of(lags: Mapping[int, int]) -> tuple[list[int], list[float]]:
    """Return tokens by lag from 0 on, and the edges of the bins: lag 1 is between 0.5 and 1.5."""
    most = max(lags, default=0)
    return [lags.get(steps, 0) for steps in range(most + 1)], [steps - 0.5 for steps in range(most + 2)]


class Tracker(Protocol):
    """Receives the metrics of a run. All calls come from one thread, which is not the training thread.

    Any call may raise or hang: `learner.observability.trackers.fanout.Trackers` isolates training from that.
    """

    name: str

    def open(self, facts: RunInfo) -> None:
        """Start the record of the run, or continue an existing one."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step, all finite."""

    def show(self, step: int, detail: StepDetail, rows: int) -> None:
        """Show the histogram of lags, and a table of `rows` trajectories of the step (0: no table)."""

    def close(self) -> None:
        """Flush and close. Called once, only after `open` has succeeded."""


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


MAX_TEXT = 20_000
TABLE_ROWS = 8
"""Trajectories per table, of different groups as far as possible."""
"""Characters of a trajectory's text in a table; the journal has all of it."""

Decode = Callable[[Sequence[int]], str]


def table_rows(
    groups: Sequence[TrajectoryGroup], step: int, now_step: int, decode: Decode, count: int
) -> list[list[Cell]]:
    """Return the rows of `count` trajectories by COLUMNS: the first of each group, then the second.

    now_step  step of the policy before the update
    """
    size = max((len(g.trajectories) for g in groups), default=0)
    order = [(g, g.trajectories[n]) for n in range(size) for g in groups if n < len(g.trajectories)]
    return [_row(group, trajectory, step, now_step, decode) for group, trajectory in order[:count]]


def _row(group: TrajectoryGroup, one: Trajectory, step: int, now_step: int, decode: Decode) -> list[Cell]:
    first, question = one.first_version(), group.question
    age = -1 if first is None else lag(now_step, first)
    asked: list[Cell] = [step, group.seq, question.text, " | ".join(question.answers)]
    counts: list[Cell] = [one.turns, one.searches, age]
    return [*asked, one.answer, one.reward, str(one.status), *counts, decode(one.ids.tolist())[:MAX_TEXT]]


@lru_cache(1)
def decoder(model: Path) -> Decode:
    """Return a function from token ids to text. Reads the model's tokenizer; without one it returns the ids."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception:  # tokenizers raises Exception itself for a file that is missing or malformed
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
