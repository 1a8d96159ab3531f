"""Redis for processes with an event loop: typed errors, deadlines, and one way of waiting for Redis to come back.

redis-py repeats nothing by itself, and a reader that blocks has a connection apart from the commands.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import redis.asyncio
from redis import exceptions

from protocol.errors import ForayError, StateLost, UserError
from protocol.keys import Keys
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis.client import close_async, connect_async
from protocol.runtime.redis.errors import RedisFull, RedisRefused, RedisUnavailable, translate_errors
from protocol.runtime.redis.server import SETTING

log = logging.getLogger(__name__)
T = TypeVar("T")

BLOCK_MS = 1000
"""How long a read for new tasks blocks: also how long it may not notice a stop."""
COMMAND_S = 10.0
"""Deadline of a command that does not block."""
REFUSAL_S = 15.0
"""A refusal is over when it has not come again for this long: longer than a `Backoff` sleeps."""


class RedisClient:
    """Asynchronous commands, and blocking reads on a connection of their own. The learner alone loads functions."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._commands, self._reader = connect_async(url), connect_async(url)
        self.keys = keys
        self.refused = 0
        """How many answers Foray did not expect."""
        self._refusal = (-math.inf, "")

    @property
    def refusal(self) -> str:
        """The last answer that Foray did not expect, if it is at most REFUSAL_S old; else ""."""
        at, text = self._refusal
        return text if time.monotonic() - at < REFUSAL_S else ""

    @contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        try:
            with translate_errors(key, wait_if_refused=True):
                yield
        except RedisRefused as error:
            self.refused += 1
            self._refusal = (time.monotonic(), str(error))
            raise

    async def aclose(self) -> None:
        await close_async(self._commands)
        await close_async(self._reader)

    async def call(self, function: str, keys: Sequence[str], *args: str | bytes | int) -> Any:
        """Call a Redis function. Raises RedisUnavailable or StateLost."""
        async with self.commands() as commands:
            return await commands.fcall(function, len(keys), *keys, *args)

    @asynccontextmanager
    async def commands(self, key: str = "") -> AsyncIterator[redis.asyncio.Redis]:
        """Lend the client of redis-py for commands (about `key`) that together take COMMAND_S at most.

        Raises RedisUnavailable (RedisFull, RedisRefused) or StateLost.
        """
        with self._errors(key):
            async with asyncio.timeout(COMMAND_S):
                yield self._commands

    async def batch(self, *commands: tuple[Any, ...], atomic: bool = False) -> list[Any]:
        """Send `commands` together, each as in Redis' manual, and return their replies. Raises RedisUnavailable."""
        async with self.commands() as client, client.pipeline(transaction=atomic) as pipe:
            for command in commands:
                await pipe.execute_command(*command)  # queues it; the reply comes with execute
            return await pipe.execute() if commands else []

    async def write(self, *commands: tuple[Any, ...], full: tuple[Any, ...], atomic: bool = False) -> None:
        """Send `commands` together; if Redis is full, call the function `full` (name, keys, arguments) instead, which
        writes the same and is allowed to then. Raises RedisUnavailable.
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
        """Return the time in seconds by the clock of Redis, which all hosts share. Raises RedisUnavailable."""
        async with self.commands() as client:
            seconds, micros = await client.time()
        return float(seconds) + float(micros) / 1e6

    async def eviction_policy(self) -> str:
        """Return the server's `maxmemory-policy`, "" if this user may not ask for it. Raises RedisUnavailable."""
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
        """Read new entries (XREADGROUP), blocking up to BLOCK_MS. Raises RedisUnavailable or StateLost."""
        with self._errors(stream):
            async with asyncio.timeout(BLOCK_MS / 1000 + COMMAND_S):
                reply: Any = await self._reader.xreadgroup(group, consumer, {stream: ">"}, count=count, block=BLOCK_MS)
        return [entry for _, entries in reply or [] for entry in entries]


class Backoff:
    """Wait between the tries of one activity; log when trouble begins and when it ends.

    at_first  what is logged where streams are missing before the first try that worked: no trouble, but a process that
              started before the learner, which creates them
    """

    def __init__(self, doing: str, waits: WaitTimer, *, longest_s: float = 5.0, at_first: str = "") -> None:
        self._doing, self._waits, self._longest_s = doing, waits, longest_s
        self._at_first = at_first
        self._failures = 0
        self._last = ""

    async def sleep(self, error: ForayError) -> None:
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
        with self._waits.blocked_on("learner" if early else "redis"):
            await asyncio.sleep(ceiling * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        """Start over: the last try worked."""
        if self._last:
            log.info("%s: goes on after %d failures", self._doing, self._failures)
        self._failures, self._last, self._at_first = 0, "", ""


async def retry_until_available(backoff: Backoff, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, repeated until Redis takes it. Only for calls that may safely be made twice."""
    while True:
        try:
            result = await call()
        except (RedisUnavailable, StateLost) as error:
            await backoff.sleep(error)
        else:
            backoff.reset()
            return result
