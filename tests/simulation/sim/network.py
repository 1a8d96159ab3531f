"""The network between processes and Redis: commands and replies take time, and may be lost, late or cut off.

A command may be executed after its sender has given up or died. So a missing reply does not show whether the command
was executed.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from redis import exceptions
from sim.clock import Clock, Killed, Process
from sim.sim_redis import SimRedis

Travel = Generator[float, None, Any]


@dataclass
class Trouble:
    """Probabilities per command during faults. `hangs`: that a connection is not refused, but times out."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    hangs: float = 0.3


class Network:
    """Between all processes and one Redis. `*_until` are moments of virtual time."""

    def __init__(self, clock: Clock, redis: SimRedis, trouble: Trouble) -> None:
        self.clock, self.redis, self.trouble = clock, redis, trouble
        self.faults: Counter[str] = Counter()
        self.down_until = self.stopped_until = -math.inf
        self.cut_until: dict[str, float] = {}
        self.refused: Counter[str] = Counter()
        """Commands of each process that found Redis away."""

    def travel(self, process: Process, execute: Callable[[], Any], timeout: float) -> Travel:
        """Yields seconds to wait; returns the reply. Raises redis-py's errors."""
        clock, rng, trouble = self.clock, self.clock.rng, self.trouble
        deadline = clock.now + timeout
        if rng.random() < trouble.slow:
            yield rng.uniform(0.05, 2.0)
        elif rng.random() < 0.6:
            yield rng.uniform(0.0002, 0.004)
        if clock.now < self.down_until or clock.now < self.cut_until.get(process.name, -math.inf):
            self.refused[process.name] += 1
            yield 0.05 if rng.random() < 1 - trouble.hangs else timeout
            raise exceptions.ConnectionError("Connection refused")
        if clock.now < self.stopped_until:
            # Redis is stopped: the command waits in its socket, and is executed when it resumes
            if self.stopped_until >= deadline:
                self.faults["done after the time-out"] += 1
                clock.at(self.stopped_until, self._done_unseen(execute))
                yield deadline - clock.now
                raise exceptions.TimeoutError("Timeout reading from socket")
            yield self.stopped_until - clock.now
        chance = rng.random()
        if chance < trouble.lost_request:
            self.faults["request lost"] += 1
            raise exceptions.ConnectionError("Connection reset by peer")
        if chance < trouble.lost_request + trouble.late:
            self.faults["done after the error"] += 1
            clock.at(clock.now + rng.uniform(0.01, 4.0), self._done_unseen(execute))
            yield 0.01
            raise exceptions.ConnectionError("Connection reset by peer")
        if not process.alive:
            raise Killed
        result = execute()
        if chance < trouble.lost_request + trouble.late + trouble.lost_reply:
            self.faults["reply lost"] += 1
            yield 0.01
            raise exceptions.ConnectionError("Connection closed by server.")
        if rng.random() < 0.2:
            yield rng.uniform(0.0, 0.004)
        return result

    def _done_unseen(self, execute: Callable[[], Any]) -> Callable[[], None]:
        def act() -> None:
            if self.clock.now < self.down_until:
                return
            try:
                execute()
            except exceptions.RedisError:
                pass  # the sender is dead

        return act


class Pipe:
    """Commands sent together, executed atomically."""

    def __init__(self, redis: SimRedis) -> None:
        self._redis = redis
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def execute_all(self) -> list[Any]:
        """Every reply; raises the first error, after all were done, as redis-py does."""
        if any(name == "xinfo_consumers" for name, *_ in self.calls):
            self._redis.observer.looked()
        replies: list[Any] = []
        first: Exception | None = None
        for name, args, more in self.calls:
            try:
                replies.append(perform(self._redis, name, args, more))
            except exceptions.RedisError as error:
                first = first or error
        self.calls = []
        if first is not None:
            raise first
        return replies


def perform(redis: SimRedis, name: str, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """One command of the model."""
    redis.guard(name)
    return getattr(redis, name)(*args, **more)


class SyncClient:
    """redis.Redis for a thread of a learner."""

    def __init__(self, network: Network, process: Process, timeout_s: float) -> None:
        self._network, self._process, self._timeout_s = network, process, timeout_s

    def _go(self, execute: Callable[[], Any], timeout: float | None = None) -> Any:
        clock = self._network.clock
        way = self._network.travel(self._process, execute, timeout or self._timeout_s)
        try:
            if not self._process.alive:
                raise Killed
            delay = next(way)
            while True:
                clock.wait(clock.now + delay)
                delay = next(way)
        except StopIteration as end:
            return end.value

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not hasattr(SimRedis, name):
            raise AttributeError(f"the model of Redis has no {name}: add it to sim_redis.py")
        redis = self._network.redis
        return lambda *args, **more: self._go(lambda: perform(redis, name, args, more))

    def xreadgroup(self, *args: Any, block: int = 0, **more: Any) -> Any:
        network, clock = self._network, self._network.clock
        until = clock.now + block / 1000
        while True:
            reply = self._go(lambda: perform(network.redis, "xreadgroup", args, more), self._timeout_s)
            if reply or clock.now >= until:
                return reply
            added = network.redis.added
            clock.wait(until, lambda before=added: network.redis.added != before)

    def pipeline(self, transaction: bool = True) -> SyncPipe:
        return SyncPipe(self, self._network.redis)

    def set_response_callback(self, *_: object) -> None:
        """Replies of the model need no parsing."""

    def close(self) -> None: ...


class SyncPipe(Pipe):
    """A pipeline of a SyncClient."""

    def __init__(self, client: SyncClient, redis: SimRedis) -> None:
        super().__init__(redis)
        self._client = client

    def __enter__(self) -> SyncPipe:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: self.calls.append((name, args, more))

    def execute(self) -> list[Any]:
        return self._client._go(self.execute_all) if self.calls else []


class AsyncClient:
    """redis.asyncio.Redis for the loop of a rollout server."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    async def _go(self, execute: Callable[[], Any], timeout: float = 60.0) -> Any:
        way = self._network.travel(self._process, execute, timeout)
        try:
            delay = next(way)
            while True:
                await asyncio.sleep(delay)
                delay = next(way)
        except StopIteration as end:
            return end.value
        except Killed:
            raise asyncio.CancelledError from None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not hasattr(SimRedis, name):
            raise AttributeError(f"the model of Redis has no {name}: add it to sim_redis.py")
        redis = self._network.redis
        return lambda *args, **more: self._go(lambda: perform(redis, name, args, more))

    async def xreadgroup(self, *args: Any, block: int = 0, **more: Any) -> Any:
        network, loop = self._network, asyncio.get_running_loop()
        until = loop.time() + block / 1000
        while True:
            reply = await self._go(lambda: perform(network.redis, "xreadgroup", args, more))
            if reply or loop.time() >= until:
                return reply
            added = loop.create_future()

            def wake(future: asyncio.Future[None] = added) -> None:
                if not future.done():
                    future.set_result(None)

            timer = loop.call_at(until, wake)
            network.redis.listeners.append(wake)
            try:
                await added
            finally:
                timer.cancel()
                network.redis.listeners.remove(wake)

    def pipeline(self, transaction: bool = True) -> AsyncPipe:
        return AsyncPipe(self, self._network.redis)

    async def aclose(self) -> None: ...


class AsyncPipe(Pipe):
    """A pipeline of an AsyncClient."""

    def __init__(self, client: AsyncClient, redis: SimRedis) -> None:
        super().__init__(redis)
        self._client = client

    async def __aenter__(self) -> AsyncPipe:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def execute_command(self, *words: Any) -> None:
        self.calls.append(("execute_command", words, {}))

    async def execute(self) -> list[Any]:
        return await self._client._go(self.execute_all) if self.calls else []
