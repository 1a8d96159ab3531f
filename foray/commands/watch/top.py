"""Show a run live: throughput, lag, reward, engines, and the bottleneck.

In a terminal it refreshes in place until the run ends or you press Ctrl-C; in a pipe it prints one frame after another.
For a finished run it shows the last values.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from deploy.run.run_dir import Located, add_arguments, locate

if TYPE_CHECKING:
    from deploy.run.snapshot import RunSnapshot
    from foray.watch.top import Frame

    Look = tuple[RunSnapshot, RunSnapshot | None, Mapping[str, float]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray top`."""
    add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="refresh interval in seconds (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    text = "print one JSON object per refresh: that of `foray status --json`, with `waits` and `retrievers`"
    parser.add_argument("--json", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Return 0 when the run ends or the user presses Ctrl-C."""
    found, interval = locate(args), max(0.1, args.interval)
    try:
        if args.json:
            _print((_line(found, *look) for look in _looks(found, interval)), args.once)
        elif args.once or not sys.stdout.isatty():
            _print((shown.plain() + ("" if args.once else "\n") for shown in _frames(found, interval)), args.once)
        else:
            _live(_frames(found, interval))
    except KeyboardInterrupt:
        pass
    return 0


def _print(texts: Iterator[str], once: bool) -> None:
    for text in texts:
        print(text, flush=True)
        if once:
            return


def _looks(found: Located, interval: float) -> Iterator[Look]:
    """Yield one look at the run per refresh, until its launcher has ended."""
    from foray.watch.status import look
    from foray.watch.top import Looks, read_searches

    looks = Looks()
    while True:
        found = found.refreshed()
        snapshot = look(found)
        yield snapshot, looks.before(snapshot), read_searches(found.urls(snapshot, "retriever"))
        if snapshot.is_over:
            return
        time.sleep(interval)


def _frames(found: Located, interval: float) -> Iterator[Frame]:
    from foray.watch.top import frame

    return (frame(*look, max_lag=found.run.max_lag) for look in _looks(found, interval))


def _line(found: Located, snapshot: RunSnapshot, before: RunSnapshot | None, searches: Mapping[str, float]) -> str:
    from foray.watch.status import to_json
    from learner.delivery.autoscale import wait_shares

    waits: dict[str, dict[str, float]] = {}
    for (process, cause), share in wait_shares(snapshot, before).items():
        waits.setdefault(process, {})[cause] = share
    return json.dumps(to_json(snapshot, max_lag=found.run.max_lag) | {"waits": waits, "retrievers": dict(searches)})


def _live(frames: Iterator[Frame]) -> None:
    """Show the frames in place, cut to the size of the terminal; the last one stays."""
    from rich.live import Live
    from rich.text import Text

    last: Frame | None = None
    with Live(auto_refresh=False, screen=True) as live:
        for last in frames:
            rows = last.fitted(*live.console.size)
            page = Text("\n").join(Text(text, style=_style(part, text)) for part, text in rows)
            live.update(page, refresh=True)
    if last is not None:
        print("\n".join(text for _, text in last.rows(shutil.get_terminal_size().columns)))


def _style(part: str, text: str) -> str:
    if part == "problems":
        return "bold red"
    return "bold" if text.startswith(("run ", "  engine ", "  time spent ")) else ""
