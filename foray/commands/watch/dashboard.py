"""Show a run in the browser: progress, throughput, staleness, engines, trajectories, accounting, evaluations.

It reads Redis, `metrics.jsonl` and the journal of the run directory, and works on live and on finished runs. It listens
on loopback; beyond that it needs a token (SECURITY.md), which the page asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from deploy.run.run_dir import add_arguments, locate

PORT = 8650


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray dashboard`."""
    add_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 selects a free port (default: {PORT})")


def run(args: argparse.Namespace) -> int:
    """Return 0 after Ctrl-C. Raises UserError if there is no such run or the address cannot be used."""
    try:
        asyncio.run(_serve(args))
    except KeyboardInterrupt:
        pass
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from foray.dashboard.app import build_app
    from foray.dashboard.source import RunData
    from protocol.runtime.http.auth import read_access
    from protocol.runtime.http.server import listening

    found, access = locate(args, without_redis=True), read_access(os.environ)
    app = build_app(RunData(found), access)
    busy = "give another --port; 0 selects a free one"
    async with listening(app, args.host, args.port, access=access, setting="--host", todo=busy) as listener:
        token = "" if access.open else "; the page asks for a token of the role viewer or operator"
        print(f"run {found.run.id}: {listener.url}/ (Ctrl-C ends it{token})", flush=True)
        await asyncio.Event().wait()
