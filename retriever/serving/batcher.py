"""Many requests, few calls: dynamic batching across requests, for searches and for embeddings alike.

    handlers --ask()--> waiting --run()--> call(batch), `lanes` at once --> tickets' outcomes --> handlers
                 |  join of equal keys         one batch, one group at a time

One batch of 512 costs a dense index about as much as a few single queries, and neither FAISS on GPUs nor an encoder
may be entered by two threads: with one lane, requests meet here and one call at a time is made. A back-end that only
waits for somebody else takes many lanes, so that a slow answer holds up nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from protocol.errors import ForayError
from retriever.backends.base import Fault
from retriever.metrics import Metrics
from retriever.serving.admission import Room

log = logging.getLogger(__name__)

LINGER = 0.1
"""Share of a call's time for which the next batch waits for those whom that call has answered. Clients that ask again
at once would else form two halves that take turns, and batches of half the size cost a flat index a tenth more."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Stopped(ForayError):
    """The service is going down (503)."""


_STOPPED = Fault("stopped", "the service is going down")


class _Wish:
    """One request's wait for some tickets."""

    __slots__ = ("future", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Ticket(Generic[Key, Value]):
    """One distinct key on its way through the back-end. `wishes` are those of the requests that want it."""

    __slots__ = ("arrived", "key", "outcome", "wishes")

    def __init__(self, key: Key, now: float) -> None:
        self.key, self.arrived = key, now
        self.outcome: Value | Fault = _STOPPED
        self.wishes: set[_Wish] = set()

    def resolve(self, outcome: Value | Fault) -> None:
        """Note the outcome, and wake the requests that waited for this ticket last."""
        self.outcome = outcome
        for wish in self.wishes:
            wish.left -= 1
            if not wish.left and not wish.future.done():
                wish.future.set_result(None)
        self.wishes.clear()


class Batcher(Generic[Key, Value]):
    """Belongs to one event loop. `ask` is for any number of tasks, `run` for one."""

    def __init__(
        self,
        call: Callable[[Sequence[Key]], Awaitable[Sequence[Value | Fault]]],
        *,
        group: Callable[[Key], Hashable],
        window_s: float,
        max_batch: int,
        lanes: int,
        room: Room,
        metrics: Metrics,
        keep: Callable[[Key, Value], None] | None = None,
    ) -> None:
        """`call` gives one outcome a key, in order, for keys of one `group`. `keep` is told every answer, once."""
        self._call, self._group, self._keep = call, group, keep
        self._window_s, self._max_batch = window_s, max_batch
        self._room, self._metrics = room, metrics
        self._waiting: dict[Key, _Ticket[Key, Value]] = {}
        self._flying: dict[Key, _Ticket[Key, Value]] = {}
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._wanted = max_batch
        """Waiting tickets at which `_full` is set."""
        self._lanes = asyncio.Semaphore(lanes)
        self._linger = LINGER if lanes == 1 else 0.0
        self._returning, self._linger_until = 0, 0.0
        self._stopped = False

    async def ask(self, keys: Sequence[Key]) -> dict[Key, Value | Fault]:
        """One outcome a distinct key.

        Raises Overloaded (nothing was queued) or Stopped. When cancelled, its keys are dropped unless another request
        waits for the same ones or the back-end has them already.
        """
        if self._stopped:
            raise Stopped(_STOPPED.detail)
        distinct = list(dict.fromkeys(keys))
        tickets, fresh = self._known(distinct)
        if fresh and not self._room.enter(len(fresh)):
            await self._room.wait(len(distinct))
            # the queue was another one then: some keys may have been asked for meanwhile, others answered
            tickets, fresh = self._known(distinct)
            if self._stopped:
                self._room.leave(len(distinct))
                raise Stopped(_STOPPED.detail)
            self._room.leave(len(distinct) - len(fresh))
        if fresh:
            now = time.monotonic()
            for key in fresh:
                ticket = self._waiting[key] = _Ticket(key, now)
                tickets.append(ticket)
            self._arrived.set()
            if len(self._waiting) >= self._wanted:
                self._full.set()
        if len(keys) > len(fresh):
            self._metrics.shared.inc(len(keys) - len(fresh))
        if tickets:
            await self._wait_for(tickets)
        outcomes = {ticket.key: ticket.outcome for ticket in tickets}
        if any(outcome is _STOPPED for outcome in outcomes.values()):
            raise Stopped(_STOPPED.detail)
        return outcomes

    def _known(self, keys: Sequence[Key]) -> tuple[list[_Ticket[Key, Value]], list[Key]]:
        """(tickets of the keys that are on their way, the other keys)."""
        found = [(key, self._waiting.get(key) or self._flying.get(key)) for key in keys]
        return [ticket for _, ticket in found if ticket], [key for key, ticket in found if not ticket]

    async def _wait_for(self, tickets: Sequence[_Ticket[Key, Value]]) -> None:
        wish = _Wish(len(tickets))
        for ticket in tickets:
            ticket.wishes.add(wish)
        try:
            await wish.future
        except asyncio.CancelledError:
            for ticket in tickets:
                ticket.wishes.discard(wish)
                if not ticket.wishes and self._waiting.get(ticket.key) is ticket:
                    del self._waiting[ticket.key]
                    self._room.leave(1)
                    self._metrics.dropped.inc()
            raise

    async def run(self) -> None:
        """Consumes waiting tickets, produces their outcomes. Waits for a first ticket, then until the oldest is
        `window_s` old or `max_batch` are there, then for a free lane, then a little for those whom the last call has
        answered; unblocked by `ask` and by the end of a batch. Ends by cancellation, which fails all that are left with
        Stopped.
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
                    await self._lanes.acquire()
                    await self._gather(self._returning, self._linger_until)
                    if batch := self._take():
                        batches.create_task(self._fly(batch))
                    else:
                        self._lanes.release()  # all that waited have left
        finally:
            self._stopped = True
            left = [*self._waiting.values(), *self._flying.values()]
            self._waiting.clear()
            self._flying.clear()
            self._room.leave(len(left))
            for ticket in left:
                ticket.resolve(_STOPPED)

    async def _gather(self, count: int, until: float) -> None:
        """Wait until `count` tickets (or a full batch) are waiting, or the clock says `until`."""
        self._wanted = min(count, self._max_batch)
        left = until - time.monotonic()
        if left <= 0 or len(self._waiting) >= self._wanted:
            return
        self._full.clear()
        try:
            async with asyncio.timeout(left):
                await self._full.wait()
        except TimeoutError:
            pass  # the time is over

    def _take(self) -> list[_Ticket[Key, Value]]:
        batch = list(islice(self._waiting.values(), self._max_batch))
        now = time.monotonic()
        for ticket in batch:
            del self._waiting[ticket.key]
            self._flying[ticket.key] = ticket
            self._metrics.queue_seconds.observe(now - ticket.arrived)
        return batch

    async def _fly(self, batch: Sequence[_Ticket[Key, Value]]) -> None:
        start = time.monotonic()
        groups: dict[Hashable, list[_Ticket[Key, Value]]] = {}
        for ticket in batch:
            groups.setdefault(self._group(ticket.key), []).append(ticket)
        try:
            for group in groups.values():
                await self._fly_group(group)
        finally:
            end = time.monotonic()
            self._returning = len(self._waiting) + len(batch)
            self._linger_until = end + self._linger * (end - start)
            self._lanes.release()
        self._room.note_speed(len(batch), end - start)

    async def _fly_group(self, group: Sequence[_Ticket[Key, Value]]) -> None:
        keys = [ticket.key for ticket in group]
        try:
            outcomes = await self._call(keys)
            if len(outcomes) != len(keys):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(keys)} keys")
        except Exception as error:
            # back-ends give a Fault for what can go wrong: this is a bug in one, which must not end the service
            log.exception("a batch of %d failed", len(keys))
            outcomes = [Fault("internal", f"{type(error).__name__}: {error}")] * len(keys)
        for ticket, outcome in zip(group, outcomes, strict=True):
            # popped before anyone is woken: who asks again must not join a ticket that is over
            self._flying.pop(ticket.key, None)
            if isinstance(outcome, Fault):
                self._metrics.failed(outcome.cause)
            elif self._keep is not None:
                self._keep(ticket.key, outcome)
            ticket.resolve(outcome)
        self._room.leave(len(group))
