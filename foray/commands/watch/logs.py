"""Show the logs of a run's processes, merged by time, with the name of the process before each line.

`foray logs RUN_DIR engine learner` shows some processes only: `engine` means every engine, `engine-1` one. With -f it
follows the logs, also those of processes that start later, until you press Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.run.run_dir import require
from protocol.errors import UserError
from protocol.runtime.settings_errors import suggest

if TYPE_CHECKING:
    from foray.watch.logs import LogEntry

LINES, POLL_S = 200, 0.3
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
COLOURS = (36, 32, 33, 35, 34, 96, 92, 95)
"""ANSI codes, one for each process in turn."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray logs`."""
    what = "run directory (default: the latest below ./runs), and names of processes"
    parser.add_argument("given", nargs="*", metavar="RUN_DIR | PROCESS", help=what)
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")
    parser.add_argument(
        "--since", help="only entries of this time and later: 30s, 10m, 2h, 1d, HH:MM or YYYY-MM-DD HH:MM"
    )
    parser.add_argument("--level", default="DEBUG", help="only entries of this level and above, e.g. WARNING")
    text = f"only the last N entries, 0 for all (default: {LINES}; with --since all)"
    parser.add_argument("-n", "--lines", type=int, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    """Return 0. Raises UserError if there is no such run or process."""
    from foray.watch.logs import LEVELS, is_of, processes_of

    directory, wanted = _choose(args.given)
    names = list(processes_of(directory))
    if not names and not args.follow:
        raise UserError(
            f"{directory} has no logs",
            why="`foray up` and `foray demo` write them to RUN_DIR/logs; others log to stderr",
            todo="wait until it has started, or give another run directory",
        )
    for word in wanted:
        if names and not any(is_of(name, [word]) for name in names):
            raise UserError(f"{directory} has no log of {word!r}", todo=suggest(word, names))
    level = args.level.upper()
    if level not in LEVELS:
        raise UserError(f"unknown --level {args.level!r}", todo=suggest(level, LEVELS))
    since = since_of(args.since, datetime.now()) if args.since else 0.0
    if (args.lines or 0) < 0:
        raise UserError(f"--lines {args.lines} is below 0", todo="give a number of entries, 0 for all")
    most = args.lines if args.lines is not None else (0 if args.since else LINES)
    batches = _batches(directory, wanted, LEVELS[LEVELS.index(level) :], since, follow=args.follow)
    printer = _Printer(max(map(len, names), default=0))
    try:
        for number, batch in enumerate(batches):
            for entry in deque(batch, maxlen=most or None) if number == 0 else batch:
                printer.show(entry)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    return 0


def since_of(text: str, now: datetime) -> float:
    """Return seconds since 1970 of `--since`: a duration before `now`, or a time. Raises UserError otherwise."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip()):
        return now.timestamp() - float(found[1]) * UNITS[found[2]]
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text.strip()):
            clock = text.strip().zfill(8 if text.count(":") == 2 else 5)
            return datetime.fromisoformat(f"{now:%Y-%m-%d}T{clock}").timestamp()
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        raise UserError(
            f"--since {text!r} is not a time", todo="give a duration such as 10m, or a time such as 2026-01-31 12:00"
        ) from None


def _choose(given: Sequence[str]) -> tuple[Path, list[str]]:
    """Return (run directory, names of processes): the first word may be a directory."""
    if given and (os.sep in given[0] or Path(given[0]).is_dir()):
        return require(Path(given[0])), list(given[1:])
    return require(None), list(given)


def _batches(
    directory: Path, wanted: Sequence[str], levels: Sequence[str], since: float, *, follow: bool
) -> Iterator[Iterator[LogEntry]]:
    """Yield the entries that there are, then with `follow` new ones again and again."""
    from foray.watch.logs import LogFile, is_of, merged, processes_of

    files: dict[str, LogFile] = {}
    try:
        while True:
            for name, path in processes_of(directory).items():
                if name not in files and is_of(name, wanted):
                    files[name] = LogFile(path)
            yield (entry for entry in merged(files.values()) if entry.level in levels and entry.at >= since)
            if not follow:
                return
            time.sleep(POLL_S)
    finally:
        for file in files.values():
            file.close()


class _Printer:
    """Prints entries to stdout, in a terminal with one colour for each process."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._colours: dict[str, int] = {}
        self._plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))

    def show(self, entry: LogEntry) -> None:
        from foray.watch.transcript import visible

        name = f"{entry.process:<{self._width}} |"
        if not self._plain:
            colour = self._colours.setdefault(entry.process, COLOURS[len(self._colours) % len(COLOURS)])
            name = f"\x1b[{colour}m{name}\x1b[0m"
        for line in entry.lines:
            print(name, visible(line))
