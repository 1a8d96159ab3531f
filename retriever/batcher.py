"""Many requests, few index calls: dynamic batching across requests.

    handlers --search()--> waiting --run()--> owner thread --> tickets' futures --> handlers
                 |  cache, join of equal queries      one batch at a time

One batch of 512 costs a dense index about as much as a few single queries, and neither FAISS on GPUs nor an encoder
may be entered by two threads. So one thread owns both, and requests meet here.
"""

from __future__ import annotations

import asyncio
import logging
import time
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import islice

from protocol.errors import ForayError
from retriever.cache import Answer, AnswerCache, Key
from retriever.metrics import Metrics

log = logging.getLogger(__name__)

EMPTY = Answer((), ())
"""The answer to a blank query."""


class Overloaded(ForayError):
    """The queue is full: try again later (429)."""


class SearchFailed(ForayError):
    """The index raised an error on this query (500)."""


class Stopped(ForayError):
    """The service is going down (503)."""


class Ticket:
    """One distinct query on its way through the index. `waiters` counts the requests that want it."""

    __slots__ = ("arrived", "future", "key", "waiters")

    def __init__(self, key: Key, now: float) -> None:
        self.key, self.arrived, self.waiters = key, now, 0
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def fail(self, error: ForayError) -> None:
        """Resolve with an error."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # read once here: nobody may be waiting any more, and that is no fault


def normalise(query: str) -> str:
    """What is searched and cached: Unicode NFC, runs of white space as one blank, none at the ends."""
    return " ".join(unicodedata.normalize("NFC", query).split())


class Batcher:
    """Belongs to one event loop. `search` is for any number of tasks, `run` for one."""

    def __init__(
        self,
        search: Callable[[Sequence[str], int], list[Answer]],
        *,
        owner: Executor,
        fingerprint: str,
        window_s: float,
        max_batch: int,
        queue_limit: int,
        cache: AnswerCache,
        metrics: Metrics,
    ) -> None:
        """`owner` runs `search` and must have exactly one thread."""
        self._search, self._owner, self._fingerprint = search, owner, fingerprint
        self._window_s, self._max_batch, self._queue_limit = window_s, max_batch, queue_limit
        self._cache, self._metrics = cache, metrics
        self._waiting: dict[Key, Ticket] = {}
        self._flying: dict[Key, Ticket] = {}
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._stopped = False

    async def search(self, queries: Sequence[str], k: int) -> list[Answer]:
        """One answer a query, in order; a blank query has no hits.

        Raises Overloaded (nothing was queued), SearchFailed or Stopped. When cancelled, its queries are dropped unless
        another request waits for the same ones or the index has them already.
        """
        keys = [Key(normalise(query), k, self._fingerprint) for query in queries]
        known: dict[Key, Answer] = {}
        tickets: dict[Key, Ticket] = {}
        fresh: list[Key] = []
        for key in dict.fromkeys(keys):
            if not key.query:
                known[key] = EMPTY
            elif (answer := self._cache.get(key)) is not None:
                known[key] = answer
            elif (ticket := self._waiting.get(key) or self._flying.get(key)) is not None:
                tickets[key] = ticket
            else:
                fresh.append(key)
        self._admit(fresh, tickets)
        self._count(keys, known, len(fresh))
        if tickets:
            await self._wait_for(list(tickets.values()))
        return [known[key] if key in known else tickets[key].future.result() for key in keys]

    def _admit(self, fresh: Sequence[Key], tickets: dict[Key, Ticket]) -> None:
        if self._stopped:
            raise Stopped("the service is going down")
        queued = len(self._waiting) + len(self._flying)
        # an idle service takes a request of any size: refusing it would be for ever
        if fresh and queued and queued + len(fresh) > self._queue_limit:
            raise Overloaded(f"{queued} queries are queued, the limit is {self._queue_limit}")
        now = time.monotonic()
        for key in fresh:
            tickets[key] = self._waiting[key] = Ticket(key, now)
        if self._waiting:
            self._arrived.set()
        if len(self._waiting) >= self._max_batch:
            self._full.set()
        self._gauge()

    def _count(self, keys: Sequence[Key], known: dict[Key, Answer], fresh: int) -> None:
        blank = sum(not key.query for key in keys)
        cached = sum(key in known for key in keys) - blank
        self._metrics.queries.inc(len(keys))
        self._metrics.blank.inc(blank)
        self._metrics.cached.inc(cached)
        self._metrics.shared.inc(len(keys) - blank - cached - fresh)

    async def _wait_for(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.waiters += 1
        try:
            # not gather: its cancellation would cancel futures that other requests wait for too
            await asyncio.wait([ticket.future for ticket in tickets])
        finally:
            for ticket in tickets:
                ticket.waiters -= 1
                if not ticket.waiters and self._waiting.get(ticket.key) is ticket:
                    del self._waiting[ticket.key]
                    self._metrics.dropped.inc()
            self._gauge()

    async def run(self) -> None:
        """Consumes waiting tickets, produces their answers. Waits for a first ticket, then until the oldest is
        `window_s` old or `max_batch` are there, then for the owner thread; unblocked by `search`. Ends by cancellation,
        which fails all that are left with Stopped.
        """
        try:
            while True:
                if not self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                await self._fill_batch()
                await self._search_batch()
        finally:
            self._stopped = True
            for ticket in [*self._waiting.values(), *self._flying.values()]:
                ticket.fail(Stopped("the service is going down"))
            self._waiting.clear()
            self._flying.clear()

    async def _fill_batch(self) -> None:
        left = next(iter(self._waiting.values())).arrived + self._window_s - time.monotonic()
        if left <= 0 or len(self._waiting) >= self._max_batch:
            return
        self._full.clear()
        try:
            async with asyncio.timeout(left):
                await self._full.wait()
        except TimeoutError:
            pass  # the window is over

    async def _search_batch(self) -> None:
        batch = list(islice(self._waiting.values(), self._max_batch))
        for ticket in batch:
            del self._waiting[ticket.key]
            self._flying[ticket.key] = ticket
        # a search for the largest k, cut, would be one call; but approximate indexes have no such prefix property
        for k in dict.fromkeys(ticket.key.k for ticket in batch):
            await self._search_group([ticket for ticket in batch if ticket.key.k == k], k)
        self._gauge()

    async def _search_group(self, group: Sequence[Ticket], k: int) -> None:
        """One index call; when it fails, one call a query, so that only those fail that must."""
        try:
            answers = await self._call([ticket.key.query for ticket in group], k)
        except Exception as error:
            if len(group) > 1:
                log.warning("a batch of %d queries failed (%r): searching them one by one", len(group), error)
                for ticket in group:
                    await self._search_group([ticket], k)
                return
            log.exception("the search for %r failed", group[0].key.query)
            self._metrics.failed.inc()
            self._flying.pop(group[0].key, None)
            group[0].fail(SearchFailed(f"the search failed: {type(error).__name__}: {error}"))
            return
        for ticket, answer in zip(group, answers, strict=True):
            self._cache.put(ticket.key, answer)
            self._flying.pop(ticket.key, None)
            if not ticket.future.done():
                ticket.future.set_result(answer)
        self._metrics.searched.inc(len(group))
        self._metrics.cache_bytes.set(self._cache.num_bytes)

    async def _call(self, queries: list[str], k: int) -> list[Answer]:
        start = time.perf_counter()
        answers = await asyncio.get_running_loop().run_in_executor(self._owner, self._search, queries, k)
        self._metrics.calls.inc()
        self._metrics.batch_size.observe(len(queries))
        self._metrics.search_seconds.observe(time.perf_counter() - start)
        if len(answers) != len(queries):
            raise RuntimeError(f"{len(answers)} answers to {len(queries)} queries")
        return answers

    def _gauge(self) -> None:
        self._metrics.queue.set(len(self._waiting) + len(self._flying))
