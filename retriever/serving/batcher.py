"""Dynamic batching across requests, for searches and embeddings: many requests, few calls of the backend.

    handlers --submit()--> waiting --run()--> call(batch), at most `max_concurrent_batches` --> outcomes --> handlers
                 |  equal keys join           one batch, one group at a time

A batch of 512 costs a dense index about as much as a few single queries, and FAISS on GPUs and encoders are not
thread-safe: with one concurrent batch, all requests share one call at a time. A backend that only waits for another
service can run many batches concurrently, so that a slow answer does not block others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from protocol.errors import ForayError
from retriever.backends.base import QueryFailure
from retriever.metrics import Metrics
from retriever.serving.admission import QueueLimit

log = logging.getLogger(__name__)

REBATCH_DELAY = 0.1
"""Share of a call's time for which the next batch waits for the clients of the last call. Clients that send their next
request immediately would otherwise form two alternating halves, and batches of half the size cost a flat index a tenth
more."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ServiceStopped(ForayError):
    """The service is shutting down (503)."""


_STOPPED_FAILURE = QueryFailure("stopped", "the service is shutting down")


class _Waiter:
    """One request's wait for `left` outcomes."""

    __slots__ = ("future", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Pending(Generic[Key, Value]):
    """One distinct key that is queued or in progress, and the requests that wait for it."""

    __slots__ = ("arrived", "key", "outcome", "waiters")

    def __init__(self, key: Key, now: float) -> None:
        self.key, self.arrived = key, now
        self.outcome: Value | QueryFailure = _STOPPED_FAILURE
        self.waiters: set[_Waiter] = set()

    def resolve(self, outcome: Value | QueryFailure) -> None:
        """Set the outcome, and wake requests that have all their outcomes."""
        self.outcome = outcome
        for waiter in self.waiters:
            waiter.left -= 1
            if not waiter.left and not waiter.future.done():
                waiter.future.set_result(None)
        self.waiters.clear()


class DynamicBatcher(Generic[Key, Value]):
    """Belongs to one event loop. Any number of tasks call `submit`, one calls `run`.

    call       returns one outcome per key, in order, for keys of one `group`
    on_result  is called once for every successful result
    """

    def __init__(
        self,
        call: Callable[[Sequence[Key]], Awaitable[Sequence[Value | QueryFailure]]],
        *,
        group: Callable[[Key], Hashable],
        window_s: float,
        max_batch: int,
        max_concurrent_batches: int,
        queue_limit: QueueLimit,
        metrics: Metrics,
        on_result: Callable[[Key, Value], None] | None = None,
    ) -> None:
        self._call, self._group, self._on_result = call, group, on_result
        self._window_s, self._max_batch = window_s, max_batch
        self._queue_limit, self._metrics = queue_limit, metrics
        self._waiting: dict[Key, _Pending[Key, Value]] = {}
        self._in_flight: dict[Key, _Pending[Key, Value]] = {}
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._wanted = max_batch
        """Number of waiting keys at which `_full` is set."""
        self._slots = asyncio.Semaphore(max_concurrent_batches)
        self._rebatch_delay = REBATCH_DELAY if max_concurrent_batches == 1 else 0.0
        self._returning, self._rebatch_until = 0, 0.0
        self._stopped = False

    async def submit(self, keys: Sequence[Key]) -> dict[Key, Value | QueryFailure]:
        """Return one outcome per distinct key.

        Raises Overloaded (nothing was queued) or ServiceStopped. When cancelled, its keys are dropped unless another
        request waits for them or they are in progress.
        """
        if self._stopped:
            raise ServiceStopped(_STOPPED_FAILURE.detail)
        distinct = list(dict.fromkeys(keys))
        joined, new = self._join(distinct)
        if new and not self._queue_limit.try_acquire(len(new)):
            await self._queue_limit.acquire(len(distinct))
            # meanwhile other requests may have submitted some keys, and some may be answered
            joined, new = self._join(distinct)
            if self._stopped:
                self._queue_limit.release(len(distinct))
                raise ServiceStopped(_STOPPED_FAILURE.detail)
            self._queue_limit.release(len(distinct) - len(new))
        if new:
            now = time.monotonic()
            for key in new:
                pending = self._waiting[key] = _Pending(key, now)
                joined.append(pending)
            self._arrived.set()
            if len(self._waiting) >= self._wanted:
                self._full.set()
        if len(keys) > len(new):
            self._metrics.shared.inc(len(keys) - len(new))
        if joined:
            await self._wait_for(joined)
        outcomes = {pending.key: pending.outcome for pending in joined}
        if any(outcome is _STOPPED_FAILURE for outcome in outcomes.values()):
            raise ServiceStopped(_STOPPED_FAILURE.detail)
        return outcomes

    def _join(self, keys: Sequence[Key]) -> tuple[list[_Pending[Key, Value]], list[Key]]:
        """Return (the pending ones of these keys, the other keys)."""
        found = [(key, self._waiting.get(key) or self._in_flight.get(key)) for key in keys]
        return [pending for _, pending in found if pending], [key for key, pending in found if not pending]

    async def _wait_for(self, keys: Sequence[_Pending[Key, Value]]) -> None:
        waiter = _Waiter(len(keys))
        for pending in keys:
            pending.waiters.add(waiter)
        try:
            await waiter.future
        except asyncio.CancelledError:
            for pending in keys:
                pending.waiters.discard(waiter)
                if not pending.waiters and self._waiting.get(pending.key) is pending:
                    del self._waiting[pending.key]
                    self._queue_limit.release(1)
                    self._metrics.dropped.inc()
            raise

    async def run(self) -> None:
        """Process queued keys until cancelled; the remaining ones fail as stopped.

        Waits for a first key, then until the oldest is `window_s` old or `max_batch` are queued, then for a free slot,
        then briefly for the clients of the last call. Unblocked by `submit` and by the end of a batch.
        """
        try:
            async with asyncio.TaskGroup() as batches:
                while True:
                    if not self._waiting:
                        self._arrived.clear()
                        await self._arrived.wait()
                        continue
                    oldest = next(iter(self._waiting.values()))
                    await self._gather(self._max_batch, oldest.arrived + self._window_s)
                    await self._slots.acquire()
                    await self._gather(self._returning, self._rebatch_until)
                    if batch := self._take():
                        batches.create_task(self._dispatch(batch))
                    else:
                        self._slots.release()  # all waiting requests were cancelled
        finally:
            self._stopped = True
            left = [*self._waiting.values(), *self._in_flight.values()]
            self._waiting.clear()
            self._in_flight.clear()
            self._queue_limit.release(len(left))
            for pending in left:
                pending.resolve(_STOPPED_FAILURE)

    async def _gather(self, count: int, until: float) -> None:
        """Wait until `count` keys (or a full batch) are queued, or until the time `until`."""
        self._wanted = min(count, self._max_batch)
        left = until - time.monotonic()
        if left <= 0 or len(self._waiting) >= self._wanted:
            return
        self._full.clear()
        try:
            async with asyncio.timeout(left):
                await self._full.wait()
        except TimeoutError:
            pass  # the time has passed

    def _take(self) -> list[_Pending[Key, Value]]:
        batch = list(islice(self._waiting.values(), self._max_batch))
        now = time.monotonic()
        for pending in batch:
            del self._waiting[pending.key]
            self._in_flight[pending.key] = pending
            self._metrics.queue_seconds.observe(now - pending.arrived)
        return batch

    async def _dispatch(self, batch: Sequence[_Pending[Key, Value]]) -> None:
        start = time.monotonic()
        groups: dict[Hashable, list[_Pending[Key, Value]]] = {}
        for pending in batch:
            groups.setdefault(self._group(pending.key), []).append(pending)
        try:
            for group in groups.values():
                await self._dispatch_group(group)
        finally:
            end = time.monotonic()
            self._returning = len(self._waiting) + len(batch)
            self._rebatch_until = end + self._rebatch_delay * (end - start)
            self._slots.release()
        self._queue_limit.record_batch(len(batch), end - start)

    async def _dispatch_group(self, group: Sequence[_Pending[Key, Value]]) -> None:
        keys = [pending.key for pending in group]
        try:
            outcomes = await self._call(keys)
            if len(outcomes) != len(keys):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(keys)} keys")
        except Exception as error:
            # backends return a QueryFailure for expected failures: this is a bug, which must not stop the service
            log.exception("a batch of %d failed", len(keys))
            outcomes = [QueryFailure("internal", f"{type(error).__name__}: {error}")] * len(keys)
        for pending, outcome in zip(group, outcomes, strict=True):
            # removed before any request wakes: a repeated request must not join a finished key
            self._in_flight.pop(pending.key, None)
            if isinstance(outcome, QueryFailure):
                self._metrics.failed(outcome.cause)
            elif self._on_result is not None:
                self._on_result(pending.key, outcome)
            pending.resolve(outcome)
        self._queue_limit.release(len(group))
