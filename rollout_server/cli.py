"""`python -m rollout_server --config FILE [rollout.port=9000 ...]`: parse, then serve.

Nothing heavy is imported before the settings have been read: `--help` and a misspelt key answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import UserError
from protocol.settings import RunSettings, read_tree, section
from rollout_server.config import RolloutSettings

REDIS_URL_VARIABLE = "FORAY_REDIS_URL"
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
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    try:
        tree = read_tree(args.config, args.overrides)
        run = require_redis(section(tree, "run", RunSettings))
        settings = section(tree, "rollout", RolloutSettings)
        from rollout_server.serve import serve

        asyncio.run(serve(run, settings, port_file=args.port_file))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0


def require_redis(run: RunSettings) -> RunSettings:
    """`run` with a Redis URL, from the environment where the setting is empty; raises UserError without one."""
    url = run.redis_url or os.environ.get(REDIS_URL_VARIABLE, "")
    if not url:
        raise UserError(
            "no Redis to talk to",
            why="run.redis_url is empty; only `foray up` starts a Redis of its own",
            todo=f"set run.redis_url=redis://127.0.0.1:6379/0 or {REDIS_URL_VARIABLE}, or use `foray up`",
        )
    return run.model_copy(update={"redis_url": url})
