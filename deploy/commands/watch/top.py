"""Show a run live: throughput, lag, reward, engines, and the bottleneck.

In a terminal it refreshes in place until the run ends or you press Ctrl-C; in a pipe it prints one frame after another.
For a finished run it shows the last values.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deploy.launcher.run_dir import Located, add_arguments, locate

if TYPE_CHECKING:
    from deploy.monitor.top import Frame


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray top`."""
    add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="refresh interval in seconds (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the run ends or the user presses Ctrl-C."""
    frames = _frames(locate(args), max(0.1, args.interval))
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


def _frames(found: Located, interval: float) -> Iterator[Frame]:
    """Yield one frame per refresh, until the launcher of the run has ended."""
    from deploy.launcher.run_dir import read_record
    from deploy.monitor.status import look
    from deploy.monitor.top import Looks, frame, read_searches

    looks = Looks()
    while True:
        seen = look(found)
        urls = read_record(found.directory).get("retrievers", [])
        yield frame(seen, looks.before(seen), read_searches(urls), max_lag=found.run.max_lag)
        if seen.is_over:
            return
        time.sleep(interval)


def _live(frames: Iterator[Frame]) -> None:
    """Show the frames in place, cut to the size of the terminal; the last one stays."""
    last: Frame | None = None
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        for last in frames:
            # cursor home, the frame, clear the rest: no flicker, no dependency
            print("\x1b[H\x1b[J" + last.fitted(*shutil.get_terminal_size()), flush=True)
        return
    with Live(auto_refresh=False, screen=True) as live:
        for last in frames:
            text = Text(last.fitted(*live.console.size))
            text.highlight_regex(r"^run .*", "bold")
            text.highlight_regex(r"(?m)^  problem: .*", "bold red")
            text.highlight_regex(r"(?m)^  (engine +state|time spent waiting).*", "bold")
            live.update(text, refresh=True)
    if last is not None:
        print(last.plain())
