"""The session's Redis, emptied for each test of the server-side functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support.private_redis import client_of


@pytest.fixture
def db(redis_socket: str) -> Iterator[redis.Redis]:
    client = client_of(redis_socket)
    client.flushall()
    client.config_set("maxmemory", 0)
    yield client
    client.config_set("maxmemory", 0)
    client.close()
