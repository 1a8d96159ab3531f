"""A client of Redis for asyncio by our rules, wherever the URL says that Redis is; the twin of the learner's.

Nothing is tried twice by the library, which may duplicate a write whose reply was lost; the deadlines of calls are our
own (see redis_client.py); no command that an ACL user may lack is sent unasked.

Behind Sentinels and in a Cluster one process serves a run: the primary that the Sentinels name, or the owner of the
slot that all keys of a run share by their braces. Connections ask where it is each time they are made, and are closed
when it answers that it is not (any more): that call fails as a lost connection does, and the next one finds the place.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import redis.asyncio
from redis import exceptions
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from protocol.errors import ForayError, StateLost, UserError, redis_text
from protocol.keys import Keys
from protocol.runtime.redis.memory_policy import SETTING
from protocol.runtime.redis.url import Address, RedisUrl, owner_of_slot, parse, text_of
from protocol.runtime.waits import Waits

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


# Redis for the rollout side: two clients, typed errors, and one way of waiting for Redis to come back.
#
# The library retries by itself up to ten times and gives a blocked read five seconds; the first may duplicate a write
# whose reply was lost, the second makes BLOCK useless. So both are set here: nothing is retried that was not asked
# to be, and a reader that blocks has a connection of its own.
#
# Deadlines are ours too. The library bounds its sends with asyncio.wait_for, which in Python 3.11 swallows a
# cancellation that arrives together with the result: a loop that was told to end would go on.

log = logging.getLogger(__name__)
T = TypeVar("T")

BLOCK_MS = 1000
"""How long a read for new tasks blocks: also how long a stop may go unnoticed by it."""


class RedisDown(ForayError):
    """No connection, no answer in time, still loading, or it cannot write to its disk: worth waiting for."""


class RedisRefused(RedisDown):
    """Redis answered with an error that Foray does not expect: most often a key holds something else, which somebody
    has written there. Waited for like an outage, since ending would lose what is in flight, and said to people.
    """


class RedisFull(ForayError):
    """At maxmemory: nothing was written. The learner's acknowledgements will make room."""


COMMAND_S = 10.0
"""Deadline of a command that does not block."""


REFUSAL_S = 15.0
"""A refusal is of the past when it has not come again for so long: longer than an `Outage` sleeps."""

_AWAY = ("MISCONF", "LOADING", "BUSY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "UNBLOCKED")
_UNUSABLE = ("BADKEY", "WRONGTYPE", "exhausted the last possible ID")
"""Words of answers that say a key holds what Foray did not write."""
_OUR_MISTAKE = (
    "unknown command",
    "unknown subcommand",
    "wrong number of arguments",
    "syntax error",
    "Invalid stream ID",
)
"""Answers to a command that is wrong in itself, whatever Redis holds: a bug of ours, or a server that is too old."""


@contextmanager
def _typed_errors(key: str = "") -> Iterator[None]:
    """The library's errors as RedisDown, RedisFull, RedisRefused and StateLost. A command that is wrong in itself, and
    what is no answer of Redis, is a bug and passes. key: what the commands are about.
    """
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise UserError(f"Redis refuses us: {error}", todo="check the user and password in run.redis_url") from None
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise RedisDown(f"{type(error).__name__}: {error}") from None
    except exceptions.ReadOnlyError as error:
        raise RedisDown(redis_text(error)) from None
    except exceptions.OutOfMemoryError as error:
        raise RedisFull(f"Redis is full (at its maxmemory): {redis_text(error)}") from None
    except exceptions.ResponseError as error:
        text = redis_text(error)
        if text.startswith(("NOGROUP", "NOSTREAM")) or "Function not found" in text:
            raise StateLost(text) from None
        if text.startswith(_AWAY):
            raise RedisDown(text) from None
        if any(words in text for words in _OUR_MISTAKE):
            raise
        raise RedisRefused(_advice(text, _KEY.search(str(error)), key)) from None


def _advice(answer: str, named: re.Match[str] | None, key: str) -> str:
    """A refusal in words: which key, what Redis says, what to do."""
    name = named[0] if named else key
    says = answer.partition(" script: ")[0]
    if not name or not any(words in answer for words in _UNUSABLE):
        return f"{name}: {says}" if name else says
    says = says.removeprefix(f"BADKEY {name}: ")
    return f"{name} does not hold what Foray writes there ({says}): `DEL {name}` lets the learner create it again"


_KEY = re.compile(r"\{[\w-]+\}:[\w.-]+(:[\w.-]+)*", re.ASCII)


class RedisClient:
    """Commands and one blocking reader. Functions are called, never loaded: that is the learner's."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._commands, self._reader = connect(url, keys.run), connect(url, keys.run)
        self.keys = keys
        self.refused = 0
        """Answers so far that Foray did not expect."""
        self._refusal = (-math.inf, "")

    @property
    def refusal(self) -> str:
        """The newest of them, while it is no older than REFUSAL_S; else ""."""
        at, text = self._refusal
        return text if time.monotonic() - at < REFUSAL_S else ""

    @contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        try:
            with _typed_errors(key):
                yield
        except RedisRefused as error:
            self.refused += 1
            self._refusal = (time.monotonic(), str(error))
            raise

    async def aclose(self) -> None:
        await self._commands.aclose()
        await self._reader.aclose()

    async def call(self, function: str, keys: Sequence[str], *args: str | bytes | int) -> Any:
        """FCALL; raises RedisDown, RedisFull or StateLost."""
        async with self.commands() as commands:
            return await commands.fcall(function, len(keys), *keys, *args)

    @asynccontextmanager
    async def commands(self, key: str = "") -> AsyncIterator[redis.asyncio.Redis]:
        """The library's client, for a few commands (about `key`) that together take COMMAND_S at most; the errors are
        ours.
        """
        with self._errors(key):
            async with asyncio.timeout(COMMAND_S):
                yield self._commands

    async def batch(self, *commands: tuple[Any, ...], atomic: bool = False) -> list[Any]:
        """Replies to `commands`, each as it is written in Redis' manual, sent together; raises RedisDown, RedisFull."""
        async with self.commands() as client, client.pipeline(transaction=atomic) as pipe:
            for command in commands:
                await pipe.execute_command(*command)  # queues it; the reply comes with execute
            return await pipe.execute() if commands else []

    async def write(self, *commands: tuple[Any, ...], full: tuple[Any, ...], atomic: bool = False) -> None:
        """`commands` sent together; where Redis is full the function `full` (name, keys, arguments), which writes the
        same and is allowed to then. Raises RedisDown, RedisFull.
        """
        try:
            await self.batch(*commands, atomic=atomic)
        except RedisFull as error:
            name, keys, *args = full
            try:
                await self.call(name, keys, *args)
            except (StateLost, UserError):  # no learner has loaded it, or an ACL file of an older Foray denies it
                raise error from None

    async def now(self) -> float:
        """Seconds by the clock of Redis, which all hosts share; raises RedisDown."""
        async with self.commands() as client:
            seconds, micros = await client.time()
        return float(seconds) + float(micros) / 1e6

    async def eviction_policy(self) -> str:
        """`maxmemory-policy` of the server, "" where this user may not ask for it; raises RedisDown."""
        async with self.commands() as client:
            try:
                return str((await client.info("memory")).get("maxmemory_policy", ""))
            except exceptions.NoPermissionError:
                pass
            try:
                return str((await client.config_get(SETTING)).get(SETTING, ""))
            except exceptions.NoPermissionError:
                return ""

    async def read(self, stream: str, group: str, consumer: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """XREADGROUP of new entries, blocking up to BLOCK_MS; raises RedisDown or StateLost."""
        with self._errors(stream):
            async with asyncio.timeout(BLOCK_MS / 1000 + COMMAND_S):
                reply: Any = await self._reader.xreadgroup(group, consumer, {stream: ">"}, count=count, block=BLOCK_MS)
        return [entry for _, entries in reply or [] for entry in entries]


class Outage:
    """One activity's patience with Redis: logs when trouble begins and when it ends, sleeps longer each time.

    at_first  what is logged where streams are missing before the first try that worked: no trouble, but a process that
              started before the learner, which makes them
    """

    def __init__(self, doing: str, waits: Waits, *, longest_s: float = 5.0, at_first: str = "") -> None:
        self._doing, self._waits, self._longest_s = doing, waits, longest_s
        self._at_first = at_first
        self._failures = 0
        self._last = ""

    async def wait(self, error: ForayError) -> None:
        """Sleep before the next try: 0.1 s doubling to `longest_s`, jittered so that not all return at once."""
        refused = isinstance(error, RedisRefused)
        early = bool(self._at_first) and isinstance(error, StateLost)
        kind = str(error) if refused else type(error).__name__
        if kind != self._last and early:
            log.info("%s", self._at_first)
        elif kind != self._last:
            log.log(
                logging.ERROR if refused else logging.WARNING,
                *("%s: waiting: %s: %s", self._doing, type(error).__name__, error),
            )
        self._last = kind
        ceiling = min(self._longest_s, 0.1 * 2 ** min(self._failures, 10))
        self._failures += 1
        with self._waits.during("learner" if early else "redis"):
            await asyncio.sleep(ceiling * random.uniform(0.5, 1.0))

    def over(self) -> None:
        """The last try worked."""
        if self._last:
            log.info("%s: goes on after %d failures", self._doing, self._failures)
        self._failures, self._last, self._at_first = 0, "", ""


async def insist(outage: Outage, call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`, repeated until Redis takes it. Only for calls that may safely be made twice."""
    while True:
        try:
            result = await call()
        except (RedisDown, RedisFull, StateLost) as error:
            await outage.wait(error)
        else:
            outage.over()
            return result
