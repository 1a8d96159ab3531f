"""`python -m rollout_server.node --config FILE [engine.kind.type=cpu ...]`: parse, then run the node."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.runtime.config import SettingsTree, section
from protocol.runtime.service_cli import add_config_arguments, run_service
from protocol.settings import RunSettings
from rollout_server.node.config import NodeSettings


def attached(tree: Mapping[str, Any], url: str) -> SettingsTree:
    """Return the tree with the attached engine at `url`, without its settings of other kinds of engines."""
    engine = dict(tree.get("engine") or {})
    given = engine.get("kind")
    kept = given if isinstance(given, dict) and given.get("type") == "attach" else {}
    engine["kind"] = {**kept, "type": "attach", "url": url}
    return SettingsTree({**tree, "engine": engine}, tree.spelt if isinstance(tree, SettingsTree) else {})


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m rollout_server.node") -> int:
    """Run a node. Return the exit status: 0 after SIGTERM or SIGINT, 2 for an error that the user must fix."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run one inference engine: launch it, register it in Redis, keep its weights up to date.",
    )
    add_config_arguments(parser, "YAML file; the sections `run` and `engine` are read", "engine.kind.threads=2")
    parser.add_argument("--attach", metavar="URL", help="attach to the running engine at URL instead of launching one")
    return run_service(parser, argv, _serve)


def _serve(args: argparse.Namespace, tree: SettingsTree) -> None:
    run = section(tree, "run", RunSettings).with_redis(os.environ)
    settings = section(attached(tree, args.attach) if args.attach else tree, "engine", NodeSettings)
    from rollout_server.node.server import serve

    asyncio.run(serve(run, settings))
