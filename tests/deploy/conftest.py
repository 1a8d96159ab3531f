"""The session's Redis as a run sees it, and child processes that are killed when a test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from deploy.launch.process import ManagedProcess
from deploy.run.redis_server import connect
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.runtime.redis.server import function_library


@pytest.fixture(scope="session")
def redis_url(redis_socket: str) -> str:
    """URL of the session's Redis."""
    return f"unix://{redis_socket}"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """An empty Redis with Foray's functions, and the streams and groups of run `test`."""
    client, keys = connect(redis_url), Keys("test")
    client.flushall()
    client.config_set("maxmemory", 64 << 20)
    client.function_load(function_library(), replace=True)
    client.xgroup_create(keys.tasks, TASK_GROUP, "0", mkstream=True)
    client.xgroup_create(keys.traj, TRAJ_GROUP, "0", mkstream=True)
    yield client
    client.config_set("maxmemory", 0)
    client.close()


@pytest.fixture
def children() -> Iterator[list[ManagedProcess]]:
    """Children that a test leaves here are killed when it ends."""
    left: list[ManagedProcess] = []
    yield left
    for child in left:
        child.kill()
        child.wait(5)
