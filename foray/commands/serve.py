"""Serve a policy to OpenAI's clients: chat completions with its search loop, or of the policy alone.

POLICY is a run in progress, a run directory or checkpoint, an exported model or another Hugging Face folder. The model
NAME searches on the server and answers; NAME-bare is the policy alone, with the messages and tools of the call. Engine
and retriever are started if necessary, with the settings of the run or of --config, and stopped at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deploy.terminal import at_least
from protocol.errors import UserError
from protocol.runtime.lifecycle import terminate_at_end_of_stdin
from protocol.runtime.progress import Progress, Say
from protocol.settings import REDIS_URL_VARIABLE

if TYPE_CHECKING:
    from foray.evaluation.targets import Served, ServingOptions, Target
    from rollout_server.chat.app import ChatOptions

PORT = 8700
TOKEN = "FORAY_SERVE_TOKEN"
"""Variable with the token of clients; with `_FILE` appended it names a file."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray serve`."""
    parser.add_argument("policy", metavar="POLICY", help="run, checkpoint or model")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for what is started")
    parser.add_argument("--name", default="", help="name of the model (default: that of the directory)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 selects a free port (default: {PORT})")
    parser.add_argument(
        *("--cors-origin",),
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose web pages may call, e.g. https://example.org, or '*' (default: none); may be repeated",
    )
    started = parser.add_argument_group("what is started")
    started.add_argument("--config", type=Path, help="configuration (default: that of the run)")
    started.add_argument("--retriever", default="", metavar="URL", help="use this retriever instead of starting one")
    started.add_argument("--no-search", action="store_true", help="start no retriever: every search returns nothing")
    started.add_argument("--dir", type=Path, help="directory for its files (default: serving/POLICY)")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--concurrency", type=at_least(1), default=256, help="calls in progress; more get 429 (default: 256)"
    )
    limits.add_argument(
        "--max-tokens", type=at_least(1), help="tokens of an answer (default: as rollout.episode allows)"
    )
    limits.add_argument("--max-body-mb", type=at_least(1), default=4, help="size of a request in MiB (default: 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object when it listens: url, token, models")
    parser.add_argument(
        "--until-stdin-ends", action="store_true", help="stop when standard input ends: with the program that holds it"
    )
    parser.epilog = (
        f"Clients send a token: that of {TOKEN} or of the file {TOKEN}_FILE, else one that is made and printed."
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 after SIGTERM, 130 after Ctrl-C, 1 if a process failed. Raises UserError."""
    from deploy.launch.launcher import RunStopped
    from foray.evaluation.targets import Needs, ServingOptions, find_target, serving

    target = find_target(args.policy, "serve")
    if target.kind in ("server", "endpoint"):
        raise UserError(f"cannot serve {args.policy}", why="it is a URL", todo="give the directory of a run or model")
    token, made = _token()
    origins = tuple(map(_origin, args.cors_origin))
    if args.until_stdin_ends:
        terminate_at_end_of_stdin()
    say = Progress.on(sys.stderr, stamp=lambda: time.strftime("%H:%M:%S "))
    options = ServingOptions(args.config, tuple(args.overrides), args.retriever)
    searches = not args.no_search and _searches(target, options)
    if not searches and not args.no_search:
        say("no retriever is configured: searches return nothing; give --retriever URL or --config FILE")
    directory = args.dir or Path("serving") / target.name
    try:
        with serving(target, Needs(policy=False, methods=False, search=searches), options, directory, say) as served:
            chosen = _options(args, target, served, token, origins)
            say.every_s = math.inf  # it serves until it is ended: nothing to wait for
            _serve(served, chosen, made, args.json)
    except RunStopped as stopped:
        return 130 if stopped.number == signal.SIGINT else 0
    return 0


def _token() -> tuple[str, bool]:
    """Return the token of clients, and whether it was made here. Raises UserError for a weak one."""
    from protocol.runtime.http.auth import read_secret, strong_token

    given = read_secret(os.environ, TOKEN)
    for name in (TOKEN, f"{TOKEN}_FILE"):  # the processes that are started do not need it
        os.environ.pop(name, None)
    return (strong_token(given, TOKEN), False) if given else (f"sk-{secrets.token_urlsafe(32)}", True)


def _origin(given: str) -> str:
    """Return an origin as browsers send it. Raises UserError."""
    url = urlsplit(given)
    origin = f"{url.scheme}://{url.netloc}".lower()
    if given != "*" and (origin != given.rstrip("/").lower() or not url.netloc or "@" in given):
        raise UserError(f"--cors-origin {given} is no origin", todo="give scheme://host or scheme://host:port, or '*'")
    return given if given == "*" else origin


def _searches(target: Target, options: ServingOptions) -> bool:
    """Return whether there is a retriever: a given one, or what a configuration says about one."""
    from foray.evaluation.targets import tree_of

    if target.kind == "run" or options.retriever:
        return True
    tree = tree_of(target, options, lambda line: None)
    search = (tree.get("rollout") or {}).get("search") or {}
    return search.get("type") != "none" and bool(search or tree.get("retriever"))


def _options(
    args: argparse.Namespace, target: Target, served: Served, token: str, origins: tuple[str, ...]
) -> ChatOptions:
    from rollout_server.chat.app import ChatOptions

    step = re.match(r"step_(\d+)", served.subject.get("checkpoint", ""))
    return ChatOptions(
        args.name or target.name,
        target.name,
        token,
        *(args.host, args.port, origins, args.concurrency, args.max_tokens, args.max_body_mb << 20),
        version=int(step[1]) if step else None,
        trains=target.kind == "run",
    )


def _serve(served: Served, options: ChatOptions, made: bool, as_json: bool) -> None:
    """Listen until a process fails or a signal comes."""
    from protocol.runtime.http.server import ThreadedServer
    from rollout_server.chat.app import BARE
    from rollout_server.chat.server import serving_chat

    if served.run is None or served.config is None:
        raise UserError(
            f"cannot use the engines of {options.policy}",
            why="its configuration is unknown, or only the directory says where its Redis is, and engines get keys",
            todo=f"export {REDIS_URL_VARIABLE} with the run's Redis, or serve one of its checkpoints",
        )
    server = ThreadedServer(serving_chat(served.run, served.config.rollout, options), "foray-serve")
    try:
        base = f"{server.url}/v1"
        if as_json:
            told = {"url": base, "models": [options.name, options.name + BARE]}
            print(json.dumps(told | ({"token": options.token} if made else {})), flush=True)
        else:
            _tell(base, options, made, print)
        served.during(lambda task: server.wait(), "serving")
    finally:
        server.close()


def _tell(base: str, options: ChatOptions, made: bool, say: Say) -> None:
    body = {"model": options.name, "messages": [{"role": "user", "content": "Who wrote Emma?"}]}
    shown = options.token if made else f"${TOKEN}"
    say(f"{base}: {options.name} searches and answers, {options.name}-bare is the policy alone")
    say(f"token: {shown}")
    header = f'"Authorization: Bearer {shown}"'
    say(f"curl {base}/chat/completions -H {header} -d {shlex.quote(json.dumps(body))}")
    say("Ctrl-C ends it")
    sys.stdout.flush()
