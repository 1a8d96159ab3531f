"""Admission control: the limit of queued queries, and the Retry-After of refused ones.

With `max_wait_s` a request waits for its turn, first come first served: many clients do not retry after 429, and a
single refusal fails their batch.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

from protocol.errors import ForayError
from protocol.runtime.timing import loop_timeout
from retriever.metrics import Metrics

MAX_RETRY_AFTER_S = 30
"""Maximum Retry-After, in seconds: speeds change, and clients give up on waits of minutes."""

MAX_WAITING = 1024
"""Maximum requests waiting for admission; further ones are refused."""

_NEWEST_WEIGHT = 0.3
"""Weight of the latest batch in the moving average of the speed."""


class Overloaded(ForayError):
    """The queue is full: retry in `retry_after_s` seconds.

    `status` is 429, or 503 after a wait, because such clients retry only after 503.
    """

    def __init__(self, message: str, retry_after_s: int, status: int) -> None:
        super().__init__(message)
        self.retry_after_s, self.status = retry_after_s, status


class QueueLimit:
    """One limit for all queries and texts that are queued or in progress.

    max_concurrent_batches  concurrent batches of the backend; used to compute Retry-After
    max_wait_s              maximum wait for admission before a refusal; 0: refuse immediately
    """

    def __init__(
        self, limit: int, metrics: Metrics, *, max_concurrent_batches: int = 1, max_wait_s: float = 0.0
    ) -> None:
        self._limit, self._metrics = limit, metrics
        self._max_concurrent_batches, self._max_wait_s = max_concurrent_batches, max_wait_s
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds_each: float | None = None

    def try_acquire(self, count: int) -> bool:
        """Admit `count` queries if they fit and no request waits. An empty service admits a request of any size, which
        would otherwise always be refused."""
        if self._waiting or not self._fits(count):
            return False
        self._add(count)
        return True

    async def acquire(self, count: int) -> None:
        """Admit `count` queries as soon as they fit and earlier requests are admitted.

        Raises Overloaded, and admits none, if that takes longer than `max_wait_s`.
        """
        if not self._max_wait_s or len(self._waiting) >= MAX_WAITING:
            raise self._overloaded()
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, admitted)
        self._waiting.append(entry)
        self._metrics.waited.inc()
        try:
            async with loop_timeout(self._max_wait_s):
                await admitted
        except BaseException as error:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()  # it may have been a large request that blocked smaller ones
            elif admitted.done() and not admitted.cancelled():
                self.release(count)  # admitted and cancelled in the same iteration of the loop
            if isinstance(error, TimeoutError):
                raise self._overloaded() from None
            raise

    def release(self, count: int) -> None:
        """Free the places of `count` queries."""
        self._add(-count)
        self._admit()

    def record_batch(self, count: int, seconds: float) -> None:
        """Update the speed: one batch of `count` took `seconds`."""
        each = seconds / count
        before = self._seconds_each
        self._seconds_each = each if before is None else before + _NEWEST_WEIGHT * (each - before)

    def retry_after_s(self) -> int:
        """Return the seconds until the current queue is done, as an integer from 1 to MAX_RETRY_AFTER_S."""
        seconds = self._used * (self._seconds_each or 0.0) / self._max_concurrent_batches
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(seconds)))

    def _fits(self, count: int) -> bool:
        return not self._used or self._used + count <= self._limit

    def _add(self, count: int) -> None:
        self._used += count
        self._metrics.queue.set(self._used)

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            count, admitted = self._waiting.popleft()
            if not admitted.done():
                self._add(count)
                admitted.set_result(None)

    def _overloaded(self) -> Overloaded:
        waited = f" after {self._max_wait_s:g} s" if self._max_wait_s else ""
        message = f"{self._used} queries are queued{waited}; the limit is {self._limit}"
        return Overloaded(message, self.retry_after_s(), 503 if self._max_wait_s else 429)
