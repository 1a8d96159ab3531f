"""Redis for the rollout side: two clients, typed errors, and one way of waiting for Redis to come back.

The library retries by itself up to ten times and gives a blocked read five seconds; the first may duplicate a write
whose reply was lost, the second makes BLOCK useless. So both are set here: nothing is retried that was not asked
to be, and a reader that blocks has a connection of its own.

Deadlines are ours too. The library bounds its sends with asyncio.wait_for, which in Python 3.11 swallows a
cancellation that arrives together with the result: a loop that was told to end would go on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import redis.asyncio
from redis import exceptions

from protocol.errors import ForayError, StateLost, UserError
from protocol.keys import Keys
from rollout_server.connect import connect
from rollout_server.waits import Waits

log = logging.getLogger(__name__)
T = TypeVar("T")

BLOCK_MS = 1000
"""How long a read for new tasks blocks: also how long a stop may go unnoticed by it."""


class RedisDown(ForayError):
    """No connection, no answer in time, still loading, or it cannot write to its disk: worth waiting for."""


class RedisFull(ForayError):
    """At maxmemory: nothing was written. The learner's acknowledgements will make room."""


COMMAND_S = 10.0
"""Deadline of a command that does not block."""


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Turns the library's errors into RedisDown, RedisFull and StateLost; the rest is a bug and passes."""
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise UserError(f"Redis refuses us: {error}", todo="check the user and password in run.redis_url") from None
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise RedisDown(f"{type(error).__name__}: {error}") from None
    except exceptions.ReadOnlyError as error:
        raise RedisDown(str(error)) from None
    except exceptions.ResponseError as error:
        text = str(error)
        if isinstance(error, exceptions.OutOfMemoryError) or text.startswith("OOM "):
            raise RedisFull(text) from None
        if text.startswith(("NOGROUP", "NOSTREAM")) or "Function not found" in text:
            raise StateLost(text) from None
        if text.startswith(
            ("MISCONF", "LOADING", "BUSY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "UNBLOCKED")
        ):
            raise RedisDown(text) from None
        raise


class RedisClient:
    """Commands and one blocking reader. Functions are called, never loaded: that is the learner's."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._commands, self._reader = connect(url, keys.run), connect(url, keys.run)
        self.keys = keys

    async def aclose(self) -> None:
        await self._commands.aclose()
        await self._reader.aclose()

    async def call(self, function: str, keys: Sequence[str], *args: str | bytes | int) -> Any:
        """FCALL; raises RedisDown, RedisFull or StateLost."""
        async with self.commands() as commands:
            return await commands.fcall(function, len(keys), *keys, *args)

    @asynccontextmanager
    async def commands(self) -> AsyncIterator[redis.asyncio.Redis]:
        """The library's client, for a few commands that together take COMMAND_S at most; the errors are ours."""
        with _typed_errors():
            async with asyncio.timeout(COMMAND_S):
                yield self._commands

    async def batch(self, *commands: tuple[Any, ...], atomic: bool = False) -> list[Any]:
        """Replies to `commands`, each as it is written in Redis' manual, sent together; raises RedisDown, RedisFull."""
        async with self.commands() as client, client.pipeline(transaction=atomic) as pipe:
            for command in commands:
                await pipe.execute_command(*command)  # queues it; the reply comes with execute
            return await pipe.execute() if commands else []

    async def now(self) -> float:
        """Seconds by the clock of Redis, which all hosts share; raises RedisDown."""
        async with self.commands() as client:
            seconds, micros = await client.time()
        return float(seconds) + float(micros) / 1e6

    async def read(self, stream: str, group: str, consumer: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """XREADGROUP of new entries, blocking up to BLOCK_MS; raises RedisDown or StateLost."""
        with _typed_errors():
            async with asyncio.timeout(BLOCK_MS / 1000 + COMMAND_S):
                reply: Any = await self._reader.xreadgroup(group, consumer, {stream: ">"}, count=count, block=BLOCK_MS)
        return [entry for _, entries in reply or [] for entry in entries]


class Outage:
    """One activity's patience with Redis: logs when trouble begins and when it ends, sleeps longer each time."""

    def __init__(self, doing: str, waits: Waits, *, longest_s: float = 5.0) -> None:
        self._doing, self._waits, self._longest_s = doing, waits, longest_s
        self._failures = 0
        self._last = ""

    async def wait(self, error: ForayError) -> None:
        """Sleep before the next try: 0.1 s doubling to `longest_s`, jittered so that not all return at once."""
        kind = type(error).__name__
        if kind != self._last:
            log.warning("%s: waiting: %s: %s", self._doing, kind, error)
            self._last = kind
        ceiling = min(self._longest_s, 0.1 * 2 ** min(self._failures, 10))
        self._failures += 1
        with self._waits.during("redis"):
            await asyncio.sleep(ceiling * random.uniform(0.5, 1.0))

    def over(self) -> None:
        """The last try worked."""
        if self._last:
            log.info("%s: goes on after %d failures", self._doing, self._failures)
        self._failures, self._last = 0, ""


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
