"""A client of Redis for asyncio by our rules, wherever the URL says that Redis is; the twin of the learner's.

Nothing is tried twice by the library, which may duplicate a write whose reply was lost; the deadlines of calls are our
own (see redis_client.py); no command that an ACL user may lack is sent unasked.

Behind Sentinels and in a Cluster one process serves a run: the primary that the Sentinels name, or the owner of the
slot that all keys of a run share by their braces. Connections ask where it is each time they are made, and are closed
when it answers that it is not (any more): that call fails as a lost connection does, and the next one finds the place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
from redis import exceptions
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from protocol.keys import Keys
from protocol.redis_url import Address, RedisUrl, owner_of_slot, parse, text_of

CONNECT_S = 3.0
FIND_S = 3.0
"""Longest wait for a Sentinel's or a node's answer about where the primary is."""
MOVED = (
    exceptions.ReadOnlyError,
    exceptions.AskError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
"""Answers of a server that does not serve the run (any more). MOVED is an AskError."""


def connect(url: str, run: str) -> redis.asyncio.Redis:
    """A client for the keys of `run`; connects at the first call. Raises UserError for what is not a Redis URL."""
    where = parse(url)
    common: dict[str, Any] = {
        "db": where.db,
        "username": where.username,
        "password": where.password,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_S,
        "health_check_interval": 0,
        "driver_info": None,  # else CLIENT SETINFO, which no ACL of Redis 7.0 can allow
        # TLS 1.3 tickets come unasked; redis-py takes bytes that nobody has read yet for a broken connection
        "client_name": "foray" if where.tls is not None else None,
    }
    tls: dict[str, Any] = dict(where.tls or {})
    secure = where.tls is not None
    if where.kind == "socket":
        return redis.asyncio.Redis(unix_socket_path=where.path, **common)
    if where.kind == "server":
        host, port = where.hosts[0]
        return redis.asyncio.Redis(host=host, port=port, ssl=secure, **common, **tls)
    finder = Finder(where, run, common)
    pool = ConnectionPool(connection_class=_RoamingTls if secure else _Roaming, find=finder.find, **common, **tls)
    finder.moved = lambda: pool.disconnect(inuse_connections=False)
    return redis.asyncio.Redis.from_pool(pool)


async def _nothing() -> None:
    return None


class Finder:
    """Where the primary of a run is now. `moved` is awaited when that is not where it was before."""

    def __init__(self, where: RedisUrl, run: str, common: dict[str, Any]) -> None:
        asked = common | (where.tls or {}) | {"ssl": where.tls is not None, "socket_timeout": FIND_S}
        self._where, self._common = where, asked
        self._slot = key_slot(Keys(run).tasks.encode())
        self._last: Address | None = None
        self._asked = deque(where.hosts)
        self.moved: Callable[[], Awaitable[None]] = _nothing

    async def find(self) -> Address:
        """The address; raises redis.ConnectionError when nobody can say."""
        address = await (self._by_sentinels() if self._where.kind == "sentinel" else self._in_cluster())
        if self._last not in (None, address):
            await self.moved()
        self._last = address
        return address

    async def _by_sentinels(self) -> Address:
        login = {"username": self._where.sentinel_username, "password": self._where.sentinel_password, "db": 0}
        said: list[str] = []
        for host, port in self._asked:
            try:
                async with redis.asyncio.Redis(host=host, port=port, **(self._common | login)) as sentinel:
                    named: Any = await sentinel.execute_command(  # type: ignore[no-untyped-call]
                        "SENTINEL GET-MASTER-ADDR-BY-NAME", self._where.service
                    )
            except (exceptions.RedisError, OSError) as error:
                said.append(f"{host}:{port}: {error}")
                continue
            if named:
                return text_of(named[0]), int(named[1])
            said.append(f"{host}:{port} knows no {self._where.service!r}")
        raise exceptions.ConnectionError("no Sentinel says where the primary is: " + "; ".join(said))

    async def _in_cluster(self) -> Address:
        said: list[str] = []
        for _ in range(len(self._asked)):
            host, port = self._asked[0]
            # another one first next time: a node that is cut off may know an old owner
            self._asked.rotate(-1)
            try:
                async with redis.asyncio.Redis(host=host, port=port, **self._common) as node:
                    slots: Any = await node.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
                said.append(f"{host}:{port}: {error}")
                continue
            owner, known = owner_of_slot(self._slot, slots, host)
            self._asked.extend(known - {*self._asked})
            if owner is not None:
                return owner
            said.append(f"{host}:{port}: nobody serves slot {self._slot}")
        raise exceptions.ConnectionError("no node of the Cluster says where the run is: " + "; ".join(said))


class _Roaming(Connection):
    """A connection to wherever `find` says, asked each time it is made."""

    def __init__(self, *, find: Callable[[], Awaitable[Address]], **options: Any) -> None:
        super().__init__(**options)
        self._find = find

    async def _connect(self) -> None:
        self.host, self.port = await self._find()
        await super()._connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except exceptions.ResponseError as error:
            # a blocked read is answered so by a server that becomes a replica
            if not isinstance(error, MOVED) and "instance state changed" not in str(error):
                raise
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError(f"{self.host}:{self.port} does not serve this run now: {error}") from error


class _RoamingTls(_Roaming, SSLConnection):
    """The same with TLS."""
