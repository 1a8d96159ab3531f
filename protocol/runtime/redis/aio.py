"""Redis for processes with an event loop: typed errors, timeouts, and retries until Redis is available.

redis-py does not retry. Blocking reads and the renewal of leases use separate connections.
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
from protocol.runtime.timing import backoff_s

log = logging.getLogger(__name__)
T = TypeVar("T")

BLOCK_MS = 1000
"""How long a read for new tasks blocks, in ms: a stop may go unnoticed for as long."""
COMMAND_S = 10.0
"""Timeout of a non-blocking command, in seconds."""
REFUSAL_S = 15.0
"""A refusal is over when it has not recurred for this many seconds: longer than a `Backoff` sleeps."""


class RedisClient:
    """Asynchronous commands. Blocking reads, and calls that are `urgent`, each have a connection that no other call can
    occupy. Only the learner loads functions."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._commands, self._reader, self._urgent = (connect_async(url) for _ in range(3))
        self.keys = keys
        self.refused = 0
        """Number of unexpected answers."""
        self._refusal = (-math.inf, "")

    @property
    def refusal(self) -> str:
        """The last unexpected answer if it is at most REFUSAL_S old, else ""."""
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
        for client in (self._commands, self._reader, self._urgent):
            await close_async(client)

    async def call(self, function: str, keys: Sequence[str], *args: str | bytes | int, urgent: bool = False) -> Any:
        """Call a Redis function. Raises RedisUnavailable or StateLost."""
        async with self.commands() as commands:
            client = self._urgent if urgent else commands
            return await client.fcall(function, len(keys), *keys, *args)

    @asynccontextmanager
    async def commands(self, key: str = "") -> AsyncIterator[redis.asyncio.Redis]:
        """Yield the redis-py client for commands (about `key`) that together take at most COMMAND_S.

        Raises RedisUnavailable (RedisFull, RedisRefused) or StateLost.
        """
        with self._errors(key):
            async with asyncio.timeout(COMMAND_S):
                yield self._commands

    async def batch(self, *commands: tuple[Any, ...], atomic: bool = False) -> list[Any]:
        """Send `commands` (name, arguments) in one batch and return their replies. Raises RedisUnavailable."""
        async with self.commands() as client, client.pipeline(transaction=atomic) as pipe:
            for command in commands:
                await pipe.execute_command(*command)  # queued; the reply comes with execute
            return await pipe.execute() if commands else []

    async def write(self, *commands: tuple[Any, ...], full: tuple[Any, ...], atomic: bool = False) -> None:
        """Send `commands` in one batch. If Redis is full, call the function `full` (name, keys, arguments) instead,
        which writes the same and may exceed maxmemory. Raises RedisUnavailable.
        """
        try:
            await self.batch(*commands, atomic=atomic)
        except RedisFull as error:
            name, keys, *args = full
            try:
                await self.call(name, keys, *args)
            except (
                StateLost,
                UserError,
            ):  # no learner has loaded the function, or an ACL file of an older Foray denies it
                raise error from None

    async def now(self) -> float:
        """Return the time on the Redis clock, in seconds, which all hosts share. Raises RedisUnavailable."""
        async with self.commands() as client:
            seconds, micros = await client.time()
        return float(seconds) + float(micros) / 1e6

    async def eviction_policy(self) -> str:
        """Return the server's `maxmemory-policy`, "" if this user may not read it. Raises RedisUnavailable."""
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

    async def wait(self, stream: str, after: str, seconds: float) -> str:
        """Wait until `stream` has entries after the id `after` (XREAD), at most `seconds`; return the last one's id.

        Returns `after` if there are none. Raises RedisUnavailable.
        """
        with self._errors(stream):
            async with asyncio.timeout(seconds + COMMAND_S):
                reply: Any = await self._reader.xread({stream: after}, block=max(1, int(1000 * seconds)))
        return str(reply[0][1][-1][0].decode()) if reply else after


class Backoff:
    """Sleep between attempts of one activity; log the first failure and the recovery.

    at_first  message if streams are missing before the first success: this process started before the learner, which
              creates them
    """

    def __init__(self, doing: str, waits: WaitTimer, *, longest_s: float = 5.0, at_first: str = "") -> None:
        self._doing, self._waits, self._longest_s = doing, waits, longest_s
        self._at_first = at_first
        self._failures = 0
        self._last = ""

    async def sleep(self, error: ForayError) -> None:
        """Sleep before the next attempt: 0.1 s, doubling up to `longest_s`, with jitter."""
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
        self._failures += 1
        ceiling = backoff_s(self._failures, 0.1, self._longest_s)
        with self._waits.blocked_on("learner" if early else "redis"):
            await asyncio.sleep(ceiling * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        """Reset after a success."""
        if self._last:
            log.info("%s: recovered after %d failures", self._doing, self._failures)
        self._failures, self._last, self._at_first = 0, "", ""


async def retry_until_available(backoff: Backoff, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, retried until Redis is available. Only for idempotent calls."""
    while True:
        try:
            result = await call()
        except (RedisUnavailable, StateLost) as error:
            await backoff.sleep(error)
        else:
            backoff.reset()
            return result
