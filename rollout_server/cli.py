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
from protocol.runtime.command_line import add_config_arguments, config_and_overrides
from protocol.runtime.config import read_tree, section
from protocol.runtime.log import start_logging
from protocol.settings import RunSettings
from rollout_server.config import RolloutSettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m rollout_server") -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 when something needs a person."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Lease tasks, roll out their trajectory groups through the engines, publish them to Redis.",
    )
    add_config_arguments(parser, "YAML file; `run` and `rollout` are read", "rollout.concurrency_groups=16")
    parser.add_argument("--port-file", type=Path, help="write the port here, atomically, once requests are answered")
    args = parser.parse_intermixed_args(argv)
    start_logging(os.environ, LOG_FORMAT)
    try:
        tree = read_tree(*config_and_overrides(args))
        run = section(tree, "run", RunSettings).with_redis(os.environ)
        settings = section(tree, "rollout", RolloutSettings)
        from rollout_server.server import serve

        asyncio.run(serve(run, settings, port_file=args.port_file))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0
