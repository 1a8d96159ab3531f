"""Show a run in the browser: progress, throughput, staleness, engines, trajectories, accounting, evaluations.

It reads Redis, `metrics.jsonl` and the journal of the run directory, and works on live and on finished runs. It listens
on loopback; beyond that it needs a token (SECURITY.md), which the page asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from contextlib import nullcontext

from deploy.run.run_dir import Located, add_arguments, locate
from foray.commands.chat import serving_policy
from foray.commands.serve import TOKEN
from protocol.runtime.http.auth import read_access, read_secret

PORT = 8650


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray dashboard`."""
    add_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 selects a free port (default: {PORT})")
    chat = f"page `chat`: ask the `foray serve` at each URL, with the token in {TOKEN}; without a URL, start one"
    parser.add_argument("--chat", nargs="*", metavar="URL", help=chat)


def run(args: argparse.Namespace) -> int:
    """Return 0 after Ctrl-C. Raises UserError if there is no such run or the address cannot be used."""
    found = locate(args, without_redis=True)
    given = nullcontext((args.chat or [], read_secret(os.environ, TOKEN)))
    try:
        with serving_policy(str(found.directory), []) if args.chat == [] else given as (urls, token):
            asyncio.run(_serve(args, found, [urls] if isinstance(urls, str) else urls, token))
    except KeyboardInterrupt:
        pass
    return 0


async def _serve(args: argparse.Namespace, found: Located, chat: Sequence[str], token: str) -> None:
    from foray.dashboard.app import build_app
    from foray.dashboard.chat import ChatProxy
    from foray.dashboard.source import RunData
    from protocol.runtime.http.server import listening

    access = read_access(os.environ)
    app = build_app(RunData(found), access, ChatProxy(chat, token))
    busy = "give another --port; 0 selects a free one"
    async with listening(app, args.host, args.port, access=access, setting="--host", todo=busy) as listener:
        asks = "" if access.open else "; the page asks for a token of the role viewer or operator"
        print(f"run {found.run.id}: {listener.url}/ (Ctrl-C ends it{asks})", flush=True)
        await asyncio.Event().wait()
