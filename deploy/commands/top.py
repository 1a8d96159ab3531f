"""A live table of a run: throughput, lag, reward, engines, and who waits for whom.

In a terminal it refreshes in place until Ctrl-C; into a pipe it prints one frame after the other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deploy import locate

if TYPE_CHECKING:
    from deploy.top import Frame


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foray top`."""
    locate.add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")


def run(args: argparse.Namespace) -> int:
    """Always 0; Ctrl-C ends it."""
    frames = _frames(locate.locate(args), max(0.1, args.interval))
    if args.once:
        print(next(frames).plain())
        return 0
    try:
        if sys.stdout.isatty():
            _live(frames)
        else:
            for shown in frames:
                print(shown.plain(), end="\n\n", flush=True)
    except KeyboardInterrupt:
        pass
    return 0


def _frames(found: locate.Located, interval: float) -> Iterator[Frame]:
    from deploy.observe import observe
    from deploy.progress import last_figures
    from deploy.rundir import read_record
    from deploy.status import with_record
    from deploy.top import frame, read_searches

    urls = found.record.get("retrievers", [])
    before = None
    while True:
        # it changes when the run ends
        record = read_record(found.directory)
        seen = with_record(observe(found.redis_url, found.run.id, found.directory), record)
        last = {"steps": float(found.run.steps)} | last_figures(found.directory / "metrics.jsonl")
        yield frame(seen, before, read_searches(urls), max_lag=found.run.max_lag, last=last)
        before = seen
        time.sleep(interval)


def _live(frames: Iterator[Frame]) -> None:
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        for shown in frames:
            # home, the frame, clear what was below: no flicker and no dependency
            print("\x1b[H\x1b[J" + shown.plain(), flush=True)
        return
    with Live(auto_refresh=False, screen=True) as live:
        for shown in frames:
            text = Text(shown.plain(), overflow="fold")
            text.highlight_regex(r"^run .*", "bold")
            text.highlight_regex(r"(?m)^  problem: .*", "bold red")
            text.highlight_regex(r"(?m)^  (engine +state|who waits for whom).*", "bold")
            live.update(text, refresh=True)
