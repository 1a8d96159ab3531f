"""`python -m rollout_server --config FILE [rollout.port=9000 ...]`: parse, then serve.

Heavy modules are imported after the settings are read, so `--help` and errors about misspelt keys are fast.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence

from protocol.runtime.config import SettingsTree, section
from protocol.runtime.service_cli import add_config_arguments, add_port_file_argument, run_service
from protocol.settings import RunSettings
from rollout_server.config import RolloutSettings


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m rollout_server") -> int:
    """Return the exit status: 0 after SIGTERM or SIGINT, 2 for an error that the user must fix."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Lease tasks, generate their trajectory groups on the engines, and publish them to Redis.",
    )
    add_config_arguments(parser, "YAML file; `run` and `rollout` are read", "rollout.concurrency_groups=16")
    add_port_file_argument(parser)
    return run_service(parser, argv, _serve)


def _serve(args: argparse.Namespace, tree: SettingsTree) -> None:
    run = section(tree, "run", RunSettings).with_redis(os.environ)
    settings = section(tree, "rollout", RolloutSettings)
    from rollout_server.server import serve

    asyncio.run(serve(run, settings, port_file=args.port_file))
