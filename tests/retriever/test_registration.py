"""A retriever in the run's Redis: registered while it serves, with or without Redis, gone when it stops."""

from __future__ import annotations

from pathlib import Path

import redis

from protocol.keys import Keys
from protocol.runtime.net import free_port
from protocol.runtime.redis import processes
from protocol.runtime.redis.aio import RedisClient
from protocol.settings import RunSettings
from retriever.server import registered
from tests.support.private_redis import redis_at
from tests.support.waiting import eventually


async def listed(url: str) -> list[str]:
    client = RedisClient(url, Keys("r"))
    try:
        return await processes.ready_urls(client, "retriever")
    finally:
        await client.aclose()


async def test_it_registers_while_it_serves_and_leaves_when_it_stops(redis_socket: str) -> None:
    run = RunSettings(id="r", redis_url=f"unix://{redis_socket}")
    async with registered(run, "one", "http://127.0.0.1:1"), registered(run, "", "http://127.0.0.1:2"):
        with redis.Redis(unix_socket_path=redis_socket) as db:
            await eventually(lambda: db.zcard(Keys("r").processes) == 2, "both have registered")
        assert sorted(await listed(run.redis_url)) == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert await listed(run.redis_url) == []


async def test_it_serves_without_redis_and_registers_when_there_is_one(tmp_path: Path) -> None:
    port = free_port()
    run = RunSettings(id="r", redis_url=f"redis://127.0.0.1:{port}/0")
    async with registered(run, "one", "http://127.0.0.1:1"):
        with redis_at(tmp_path, "--port", str(port)), redis.Redis(port=port) as db:
            await eventually(lambda: db.zcard(Keys("r").processes) == 1, "it has registered")
            assert await listed(run.redis_url) == ["http://127.0.0.1:1"]
