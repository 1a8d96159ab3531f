"""Show a run's status: its problems with suggested actions, processes, engines, streams, ledger.

The page is wrapped to a terminal, and plain in a pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from deploy.run.run_dir import add_arguments, locate


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray status`."""
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the run is healthy or finished, 1 if it has problems."""
    from foray.watch.status import look, problems, to_json
    from foray.watch.status_page import render

    found = locate(args)
    snapshot = look(found)
    if args.json:
        print(json.dumps(to_json(snapshot, max_lag=found.run.max_lag)))
    else:
        tty = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if tty else 0
        print(render(snapshot, max_lag=found.run.max_lag, width=width, colour=tty and not os.environ.get("NO_COLOR")))
    return 1 if problems(snapshot, max_lag=found.run.max_lag) else 0
