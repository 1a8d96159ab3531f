"""A private Redis for the tests of the server-side functions."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deploy.redis_child import find_server


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("r")
    path = str(folder / "s")
    child = subprocess.Popen(
        [
            str(find_server().path),
            "--port",
            "0",
            "--unixsocket",
            path,
            "--save",
            "",
            "--dir",
            str(folder),
            "--daemonize",
            "no",
        ],
        stdout=subprocess.DEVNULL,
        cwd=folder,
    )
    try:
        deadline = time.monotonic() + 20
        while not Path(path).exists():
            assert child.poll() is None and time.monotonic() < deadline, "the private Redis did not start"
            time.sleep(0.02)
        yield path
    finally:
        child.terminate()
        child.wait(10)


@pytest.fixture
def db(redis_socket: str) -> Iterator[redis.Redis]:
    client = redis.Redis(unix_socket_path=redis_socket, retry=Retry(NoBackoff(), 0))
    client.flushall()
    client.config_set("maxmemory", 0)
    yield client
    client.close()
