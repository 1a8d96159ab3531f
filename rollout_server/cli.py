"""`python -m rollout_server --config FILE [rollout.port=9000 ...]`: parse, then serve.

Nothing heavy is imported before the settings have been read: `--help` and a misspelt key answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import UserError
from protocol.redaction import start_logging
from protocol.settings import RunSettings, read_tree, section
from rollout_server.config import RolloutSettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 when something needs a person."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout_server",
        description="Lease tasks, roll out their trajectory groups through the engines, publish them to Redis.",
    )
    parser.add_argument("--config", type=Path, help="YAML file; the sections `run` and `rollout` are read")
    parser.add_argument("--port-file", type=Path, help="write the port here, atomically, once requests are answered")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. rollout.concurrency_groups=16")
    args = parser.parse_intermixed_args(argv)
    start_logging(os.environ, LOG_FORMAT)
    try:
        tree = read_tree(args.config, args.overrides)
        run = section(tree, "run", RunSettings).with_redis(os.environ)
        settings = section(tree, "rollout", RolloutSettings)
        from rollout_server.serve import serve

        asyncio.run(serve(run, settings, port_file=args.port_file))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0
