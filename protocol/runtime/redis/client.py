"""A client of Redis by our rules, wherever the URL says that Redis is: one server, behind Sentinels, or a Cluster.

The rules: nothing is tried twice by the library (a write whose reply was lost would be made twice), every wait has an
end, and no command that an ACL user may lack is sent unasked.

Behind Sentinels and in a Cluster one process serves a run: the primary that the Sentinels name, or the owner of the
slot that all keys of a run share by their braces. So the client is an ordinary one, transactions and functions
included, whose connections ask where that process is each time they are made. When it moves (a failover, a slot that
migrates) the connection is closed and the call fails as a lost connection does: whoever waits for Redis goes on to
wait, and the next connection finds the new place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, TryAgainError
from redis.retry import Retry

from protocol.keys import Keys
from protocol.runtime.redis.url import Address, RedisUrl, owner_of_slot, parse, text_of

CONNECT_S = 3.0
FIND_S = 3.0
"""Longest wait for a Sentinel's or a node's answer about where the primary is."""
MOVED = (ReadOnlyError, AskError, ClusterDownError, TryAgainError)
"""Answers of a server that does not serve the run (any more). MOVED is an AskError."""


def connect(url: str, run: str = "", *, timeout_s: float = 10.0) -> redis.Redis:
    """A client for the keys of `run` ("" where only a server is asked about itself); connects at the first call.

    timeout_s  longest wait for an answer; a blocking read must block for less
    Raises UserError for what is not a Redis URL.
    """
    where = parse(url)
    common = _common(where, timeout_s)
    tls: dict[str, Any] = dict(where.tls or {})
    secure = where.tls is not None
    if where.kind == "socket":
        return redis.Redis(unix_socket_path=where.path, **common)
    if where.kind == "server":
        host, port = where.hosts[0]
        return redis.Redis(host=host, port=port, ssl=secure, **common, **tls)
    finder = Finder(where, run, common)
    pool = ConnectionPool(connection_class=_RoamingTls if secure else _Roaming, find=finder.find, **common, **tls)
    finder.moved = lambda: pool.disconnect(inuse_connections=False)
    return redis.Redis.from_pool(pool)


def _common(where: RedisUrl, timeout_s: float) -> dict[str, Any]:
    return {
        "db": where.db,
        "username": where.username,
        "password": where.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(CONNECT_S, timeout_s),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,  # else CLIENT SETINFO, which no ACL of Redis 7.0 can allow
        # TLS 1.3 tickets come unasked; redis-py takes bytes that nobody has read yet for a broken connection
        "client_name": "foray" if where.tls is not None else None,
    }


class Finder:
    """Where the primary of a run is now. `moved` is called when that is not where it was before."""

    def __init__(self, where: RedisUrl, run: str, common: dict[str, Any]) -> None:
        asked = {"ssl": where.tls is not None, "socket_timeout": min(FIND_S, common["socket_timeout"])}
        self._where, self._common = where, common | (where.tls or {}) | asked
        self._slot = key_slot(Keys(run).tasks.encode()) if run else 0
        self._last: Address | None = None
        self._finding = threading.Lock()
        self._asked = deque(where.hosts)
        self.moved: Callable[[], None] = lambda: None

    def find(self) -> Address:
        """The address; raises redis.ConnectionError when nobody can say."""
        with self._finding:
            address = self._by_sentinels() if self._where.kind == "sentinel" else self._in_cluster()
            before, self._last = self._last, address
        if before not in (None, address):
            self.moved()
        return address

    def _by_sentinels(self) -> Address:
        login = {"username": self._where.sentinel_username, "password": self._where.sentinel_password, "db": 0}
        said: list[str] = []
        for host, port in self._asked:
            try:
                with redis.Redis(host=host, port=port, **(self._common | login)) as sentinel:
                    named: Any = sentinel.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self._where.service)
            except redis.RedisError as error:
                said.append(f"{host}:{port}: {error}")
                continue
            if named:
                return text_of(named[0]), int(named[1])
            said.append(f"{host}:{port} knows no {self._where.service!r}")
        raise redis.ConnectionError("no Sentinel says where the primary is: " + "; ".join(said))

    def _in_cluster(self) -> Address:
        said: list[str] = []
        for _ in range(len(self._asked)):
            host, port = self._asked[0]
            # another one first next time: a node that is cut off may know an old owner
            self._asked.rotate(-1)
            try:
                with redis.Redis(host=host, port=port, **self._common) as node:
                    slots: Any = node.execute_command("CLUSTER SLOTS")
            except (redis.ConnectionError, redis.TimeoutError) as error:
                said.append(f"{host}:{port}: {error}")
                continue
            owner, known = owner_of_slot(self._slot, slots, host)
            self._asked.extend(known - {*self._asked})
            if owner is not None:
                return owner
            said.append(f"{host}:{port}: nobody serves slot {self._slot}")
        raise redis.ConnectionError("no node of the Cluster says where the run is: " + "; ".join(said))


class _Roaming(Connection):
    """A connection to wherever `find` says, asked each time it is made."""

    def __init__(self, *, find: Callable[[], Address], **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._find = find

    def _connect(self) -> Any:
        self.host, self.port = self._find()
        return super()._connect()  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as error:
            # a blocked read is answered so by a server that becomes a replica
            if not isinstance(error, MOVED) and "instance state changed" not in str(error):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.ConnectionError(f"{self.host}:{self.port} does not serve this run now: {error}") from error


class _RoamingTls(_Roaming, SSLConnection):
    """The same with TLS."""
