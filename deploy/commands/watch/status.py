"""Show a run's status: processes, engines, streams, ledger, and problems with suggested actions."""

from __future__ import annotations

import argparse
import json

from deploy.launcher.run_dir import add_arguments, locate


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray status`."""
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the run is healthy or finished, 1 if it has problems."""
    from deploy.monitor.status import look, problems, render, to_json

    found = locate(args)
    seen = look(found)
    if args.json:
        print(json.dumps(to_json(seen, max_lag=found.run.max_lag)))
    else:
        print(render(seen, max_lag=found.run.max_lag))
    return 1 if problems(seen, max_lag=found.run.max_lag) else 0
