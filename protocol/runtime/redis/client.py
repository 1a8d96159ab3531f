"""Redis clients, synchronous and asynchronous: one server, a unix socket, or the primary that Sentinels name.

redis-py does not retry (it would repeat a write whose reply was lost), every wait has a timeout, and redis-py sends no
extra commands, which an ACL user may lack. Behind Sentinels each new connection asks them for the primary; a connection
to a server that has become a replica is closed, and its call fails like a lost connection. With a `file://` URL each
new connection reads the file again, so that a Redis that moved to another host is found.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError
from redis.retry import Retry
from redis.sentinel import Sentinel

from protocol.errors import UserError
from protocol.runtime.redis.url import RedisUrl, parse_redis_url

CONNECT_S = 3.0
CONNECTIONS = 1024
"""Maximum connections of a client; further calls fail at once. redis-py's default of 100 is less than a burst needs."""
SENTINEL_S = 3.0
"""Timeout for an answer from a Sentinel, in seconds."""


class _Moves:
    """Mix-in of connections to the server that the file in `url` names at the time of the connection."""

    def __init__(self, *, url: str, **options: Any) -> None:
        self._url = url
        super().__init__(**options)

    def _connect(self) -> Any:
        try:
            where = parse_redis_url(self._url)
        except UserError as error:  # the file is being replaced, or its disk is away: as if Redis did not answer
            raise ConnectionError(error.why) from None
        ((self.host, self.port),) = where.hosts
        self.username, self.password = where.username, where.password
        return super()._connect()  # type: ignore[misc]  # of an asynchronous connection: to be awaited


@cache
def _moving(kind: type) -> Any:
    """Return the class of connections of `kind` that move."""
    return type(kind.__name__, (_Moves, kind), {})


def connect(url: str, *, timeout_s: float = 10.0) -> redis.Redis:
    """Return a synchronous client, which connects at its first call. Raises UserError if `url` is not a Redis URL.

    timeout_s  timeout for an answer; a blocking read must block for less
    """
    where = parse_redis_url(url)
    options = _options(where, timeout_s) | {"retry": Retry(NoBackoff(), 0)}
    if where.kind == "socket":
        return redis.Redis(unix_socket_path=where.path, **options)
    if where.moves:
        kind = _moving(redis.Connection if where.tls is None else redis.SSLConnection)
        options |= {**(where.tls or {}), "url": url}
        return redis.Redis.from_pool(redis.ConnectionPool(kind, **options))
    if where.kind == "server":
        host, port = where.hosts[0]
        return redis.Redis(host=host, port=port, **_tls(where), **options)
    sentinel = Sentinel(where.hosts, sentinel_kwargs=_of_sentinels(where, options))  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(where.service, **_tls(where), **options)  # type: ignore[no-untyped-call]
    return client


def connect_async(url: str) -> redis.asyncio.Redis:
    """Return an asynchronous client, which connects at its first call; close it with `close_async`.

    The caller sets timeouts: redis-py uses asyncio.wait_for, which in Python 3.11 swallows a cancellation that arrives
    together with the result. Raises UserError if `url` is not a Redis URL.
    """
    where = parse_redis_url(url)
    options = _options(where, None) | {"retry": AsyncRetry(NoBackoff(), 0)}
    if where.kind == "socket":
        return redis.asyncio.Redis(unix_socket_path=where.path, **options)
    if where.moves:
        kind = _moving(redis.asyncio.Connection if where.tls is None else redis.asyncio.SSLConnection)
        options |= {**(where.tls or {}), "url": url}
        return redis.asyncio.Redis.from_pool(redis.asyncio.ConnectionPool(kind, **options))
    if where.kind == "server":
        host, port = where.hosts[0]
        return redis.asyncio.Redis(host=host, port=port, **_tls(where), **options)
    sentinel = AsyncSentinel(where.hosts, sentinel_kwargs=_of_sentinels(where, options))  # type: ignore[no-untyped-call]
    client: redis.asyncio.Redis = sentinel.master_for(where.service, **_tls(where), **options)
    return client


async def close_async(client: redis.asyncio.Redis) -> None:
    """Close `client` and, behind Sentinels, its connections to them."""
    await client.aclose()
    if isinstance(client.connection_pool, AsyncSentinelPool):
        await client.connection_pool.sentinel_manager.aclose()


def _options(where: RedisUrl, timeout_s: float | None) -> dict[str, Any]:
    return {
        "db": where.db,
        "username": where.username,
        "password": where.password,
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_S if timeout_s is None else min(CONNECT_S, timeout_s),
        "health_check_interval": 0,
        "max_connections": CONNECTIONS,
        "driver_info": None,  # disables CLIENT SETINFO, which no ACL of Redis 7.0 can allow
        # TLS 1.3 servers send tickets at any time; redis-py takes unread bytes for a broken connection
        "client_name": "foray" if where.tls is not None else None,
    }


def _tls(where: RedisUrl) -> dict[str, Any]:
    return {} if where.tls is None else {"ssl": True, **where.tls}


def _of_sentinels(where: RedisUrl, options: dict[str, Any]) -> dict[str, Any]:
    login = {"username": where.sentinel_username, "password": where.sentinel_password, "db": 0}
    timeout_s = min(SENTINEL_S, options["socket_timeout"] or SENTINEL_S)
    return options | login | _tls(where) | {"socket_timeout": timeout_s}
