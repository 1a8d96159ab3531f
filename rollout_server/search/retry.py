"""One query to its end: attempts, pauses and outages, each within its time.

deadline_s       for the line, the attempts and the pauses between them, while a retriever can be used
outage_wait_s    longest wait for one while none can; afterwards the deadline begins anew
both together    never more than their sum
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from protocol.search import Passage
from rollout_server.search.balancer import Away, Governor
from rollout_server.search.base import TIMEOUT, UNAVAILABLE, Fault
from rollout_server.search.transport import Wire

BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
Found = tuple[tuple[Passage, ...], str]
"""Passages and "", or none and the cause."""


@dataclass(frozen=True)
class Limits:
    """Seconds, and how often the retrievers may answer one query badly before it fails."""

    deadline_s: float
    attempt_s: float
    outage_wait_s: float
    attempts: int


class Pursuit:
    """`await Pursuit(...).run()` once."""

    def __init__(self, query: str, governor: Governor, wire: Wire, limits: Limits) -> None:
        self._query, self._governor, self._wire, self._limits = query, governor, wire, limits
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._deadline = self._now() + limits.deadline_s
        self._outage_left = limits.outage_wait_s
        self._failed_at: set[str] = set()
        self._bad_answers = 0
        self._pause = BACKOFF_S
        self._cause = TIMEOUT

    async def run(self) -> Found:
        """Never raises but CancelledError; ends within deadline_s + outage_wait_s."""
        while True:
            try:
                return await self._attempt(), ""
            except Away:
                if not await self._sit_out():
                    return (), UNAVAILABLE
            except TimeoutError:
                # in line until the deadline: an earlier attempt's cause says more than that
                return (), self._cause
            except Fault as fault:
                self._cause = fault.cause
                if not await self._may_go_on(fault):
                    return (), fault.cause

    @property
    def _left(self) -> float:
        return self._deadline - self._now()

    async def _attempt(self) -> tuple[Passage, ...]:
        """One request. Raises Fault, Away, or TimeoutError when the deadline ends in line."""
        async with asyncio.timeout(max(0.0, self._left)):
            place = await self._governor.enter(self._failed_at)
        started = self._now()
        try:
            time_s = max(0.001, min(self._limits.attempt_s, self._left))
            passages = await self._wire.search(place.replica.url, self._query, time_s)
        except Fault as fault:
            self._failed_at.add(place.replica.url)
            self._governor.failed(place, fault, self._now() - started)
            raise
        except BaseException:
            self._governor.left(place)
            raise
        self._governor.done(place, self._query, self._now() - started)
        return passages

    async def _may_go_on(self, fault: Fault) -> bool:
        """Whether there is another attempt, after the pause before it.

        When this failure has put the last replica aside there always is: whether the query or the retriever is to
        blame will be known when it is back.
        """
        out = not self._governor.breaker.usable
        self._bad_answers += fault.served
        if not out and (not fault.again or self._bad_answers >= self._limits.attempts):
            return False
        # Jitter: thousands of rollouts must not come back in step. What one replica asks for binds no other.
        asked_for = 0.0 if self._governor.has_other(self._failed_at) else fault.wait_s
        wait = max(asked_for, random.uniform(self._pause / 2, self._pause))
        self._pause = min(2 * self._pause, MAX_BACKOFF_S)
        if out:
            return True
        if wait >= self._left:
            return False
        self._governor.counts["search_retries"] += 1
        await asyncio.sleep(wait)
        return True

    async def _sit_out(self) -> bool:
        """Wait until a replica can be used; False when that takes too long."""
        started = self._now()
        try:
            async with asyncio.timeout(max(0.0, self._outage_left)):
                await self._governor.somebody.wait()
        except TimeoutError:
            return False
        waited = self._now() - started
        self._outage_left -= waited
        self._deadline += waited
        self._failed_at.clear()
        self._pause = BACKOFF_S
        return True
