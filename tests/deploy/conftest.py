"""A real Redis for the tests of this folder, started by the code under test and stopped in the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from deploy.child import Child
from deploy.plan import ProcessSpec, Ready
from deploy.ports import free_port
from deploy.readiness import Readiness
from deploy.redis_child import connect, find_server, redis_argv
from deploy.supervisor import Supervisor
from protocol.functions import source
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis of our own, on a loopback port."""
    directory = tmp_path_factory.mktemp("redis")
    url = f"redis://127.0.0.1:{free_port()}/0"
    argv = redis_argv(find_server().path, directory, url, maxmemory_mb=64)
    spec = ProcessSpec("redis", "redis", argv, directory / "redis.log", Ready.PING, url)
    supervisor = Supervisor(is_ready=Readiness(url, "test"), ready_s=20, shutdown_s=5)
    supervisor.spawn(spec)
    try:
        supervisor.await_ready(["redis"])
        yield url
    finally:
        supervisor.stop()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """An empty Redis with our functions loaded, and the streams and groups of run `test`."""
    client, keys = connect(redis_url), Keys("test")
    client.flushall()
    client.function_load(source(), replace=True)
    client.xgroup_create(keys.tasks, TASK_GROUP, "0", mkstream=True)
    client.xgroup_create(keys.traj, TRAJ_GROUP, "0", mkstream=True)
    yield client
    client.close()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Children that a test leaves here are killed when it ends."""
    left: list[Child] = []
    yield left
    for child in left:
        child.kill()
        child.wait(5)
