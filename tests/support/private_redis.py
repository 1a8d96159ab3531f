"""Redis servers of the tests: on a unix socket or a loopback port, without snapshots, ended with the block."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deploy.run.redis_server import find_server

STARTS_S = 30.0


@cache
def program() -> Path:
    """The server program of this machine."""
    return find_server().path


@contextmanager
def redis_at(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Redis that listens on `folder/s`, whose path has at most 100 characters; `options` come last."""
    socket, log = folder / "s", folder / "redis.log"
    socket.unlink(missing_ok=True)
    argv = [str(program()), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "", *options]
    with log.open("ab") as output:
        child = subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=folder)
    try:
        with client_of(socket) as client:
            deadline = time.monotonic() + STARTS_S
            while not answers(client):
                assert child.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
        yield child
    finally:
        child.kill()
        child.wait(10)


def client_of(socket: Path | str, **options: object) -> redis.Redis:
    """A client without retries."""
    return redis.Redis(unix_socket_path=str(socket), retry=Retry(NoBackoff(), 0), **options)  # type: ignore[arg-type]


def answers(client: redis.Redis) -> bool:
    """Whether the server answers now: it is up and has loaded its file."""
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
