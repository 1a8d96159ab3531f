"""List the runs below a directory: state, step, last reward, age. Reads files only, so it works for runs elsewhere."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.run.run_dir import RECORD, configuration_of, is_held, read_configuration, read_record
from deploy.run.snapshot import ENDS
from deploy.terminal import aligned
from protocol.errors import UserError


@dataclass(frozen=True)
class FoundRun:
    """A run directory.

    state    that of the launcher: starting, running, stopping, done, stopped, interrupted, failed; killed: it ended
             without a word
    step     steps done, 0 before the first
    steps    steps in the configuration, None if that cannot be read
    reward   mean reward of the last step
    started  seconds since 1970 of its last start
    """

    run: str
    state: str
    step: int
    steps: int | None
    reward: float | None
    started: float
    directory: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray runs`."""
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs"), help="default: ./runs")
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> int:
    """Return 0. Raises UserError if there is no such directory."""
    if not args.directory.is_dir():
        raise UserError(f"{args.directory} is not a directory", todo="give the directory that contains your runs")
    found = sorted(find_runs(args.directory), key=lambda one: -one.started)
    if args.json:
        print(json.dumps([asdict(one) for one in found]))
    elif not found:
        print(f"no runs in {args.directory}: `foray demo` and `foray up` make them")
    else:
        print("\n".join(_table(found, time.time())))
    return 0


def find_runs(root: Path) -> Iterator[FoundRun]:
    """Yield the runs in `root` itself and two levels below it: directories with a run.json."""
    for pattern in (RECORD, f"*/{RECORD}", f"*/*/{RECORD}"):
        for path in root.glob(pattern):
            yield _read(path.parent, read_record(path.parent))


def _read(directory: Path, record: Mapping[str, Any]) -> FoundRun:
    from deploy.run.history import read_history

    last = read_history(directory / "metrics.jsonl").last
    state = str(record.get("state", ""))
    try:
        alive = is_held(directory)
    except OSError:  # a directory that we may only read
        alive = state not in ENDS
    return FoundRun(
        run=str(record.get("id", directory.name)),
        state=state if alive or state in ENDS else "killed",
        step=int(last.get("step", 0)),
        steps=_steps(directory),
        reward=last.get("reward_mean"),
        started=float(record.get("started") or 0.0),
        directory=str(directory),
    )


def _steps(directory: Path) -> int | None:
    path = configuration_of(directory)
    try:
        tree = read_configuration(path, directory) if path else {}
        return int((tree.get("run") or {})["steps"])
    except (UserError, KeyError, TypeError, ValueError):
        return None


def _table(found: list[FoundRun], now: float) -> list[str]:
    from foray.watch.status import span

    rows = (
        (
            one.run,
            one.state,
            f"{one.step}/{one.steps}" if one.steps else str(one.step),
            "-" if one.reward is None else f"{one.reward:.3f}",
            span(max(0.0, now - one.started)) if one.started else "-",
            one.directory,
        )
        for one in found
    )
    return aligned(("run", "state", "step", "reward", "started ago", "directory"), rows)
