"""Client of the retrievers: `RetryingQuery` runs a query, `ReplicaBalancer` picks a replica, `QueryBatcher` sends it.

Identical queries in flight share one request, since the trajectories of a group often send the same query at the same
time. The request is cancelled when its last waiting caller is cancelled.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from protocol.runtime.lifecycle import cancel_all
from protocol.runtime.metrics import WaitTimer
from protocol.search import MAX_QUERY_CHARS, MAX_TOPK
from protocol.settings import Settings
from rollout_server.search.balancer import ReplicaBalancer
from rollout_server.search.base import CLOSED, SearchResult
from rollout_server.search.retry import QueryLimits, QueryResult, RetryingQuery
from rollout_server.search.transport import Dialect, SearchTransport

if TYPE_CHECKING:
    from protocol.runtime.redis.aio import RedisClient

URL = re.compile(r"https?://([^\s/@]*@)?(\[[^]\s]+\]|[^]\s/:@?#[]+)(:\d+)?(/|$)")


class HttpSearchSettings(Settings):
    """Retrievers over HTTP, in Search-R1's dialect or ReSearch's."""

    type: Literal["http"] = "http"
    urls: tuple[str, ...] = ()
    """Base URLs of the retrievers, all with the same index. Queries go to the least loaded healthy one. Empty: those
    registered in the run's Redis, as every `foray retriever` with that Redis is; others join and leave meanwhile."""
    dialect: Dialect = "search_r1"
    """HTTP API: `search_r1` (POST /retrieve), or `flashrag` (POST /batch_search, as in ReSearch and ReCall)."""
    topk: int = Field(default=3, ge=1, le=MAX_TOPK)
    """Passages per query."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Timeout of one query in seconds while a retriever is healthy: queueing, attempts and back-off."""
    attempt_s: float | None = Field(default=None, gt=0)
    """Timeout of one attempt in seconds; then the query goes to another replica. Set at least four times the latency of
    an idle retriever: higher latencies count as congestion. null: `deadline_s` / 3."""
    attempts: int = Field(default=4, ge=1)
    """Maximum number of invalid answers (errors, no JSON, wrong shape) to one query. Timeouts, lost connections and
    overloaded servers do not count: they are retried until `deadline_s`."""
    outage_wait_s: float = Field(default=300.0, ge=0)
    """Timeout in seconds while no retriever is healthy; then searches fail as `unavailable`. No new task is leased
    meanwhile, so a restart of the retriever costs time, not rewards."""
    probe_s: float = Field(default=2.0, gt=0)
    """Timeout of a health check of an unhealthy retriever, in seconds."""
    connections: int = Field(default=512, ge=1)
    """Maximum queries in flight at one retriever: the ceiling of its adaptive limit. Further queries are queued. Those
    in flight at Foray's own retriever share POSTs of up to 64."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [url for url in urls if not URL.match(url)]:
            raise ValueError(f"{wrong[0]!r} is not a URL: write http://HOST:PORT, an IPv6 address as http://[::1]:8000")
        return urls

    @model_validator(mode="after")
    def _there_is_time_for_another_attempt(self) -> HttpSearchSettings:
        if self.attempt_s is not None and 2 * self.attempt_s > self.deadline_s:
            raise ValueError(
                "attempt_s must be at most half of deadline_s, to leave time for another replica after a timeout"
            )
        return self


@dataclass
class _Shared:
    """A search in flight, and the number of callers that wait for it."""

    task: asyncio.Task[QueryResult]
    waiting: int = 0


class HttpSearch:
    """Search over HTTP. May be created outside an event loop: it connects at the first query."""

    def __init__(self, settings: HttpSearchSettings) -> None:
        attempt_s = settings.attempt_s or settings.deadline_s / 3
        self._transport = SearchTransport(settings.dialect, topk=settings.topk)
        self.balancer = ReplicaBalancer(
            self._transport,
            settings.urls,
            ceiling=settings.connections,
            attempt_s=attempt_s,
            probe_s=settings.probe_s,
        )
        self._limits = QueryLimits(settings.deadline_s, attempt_s, settings.outage_wait_s, settings.attempts)
        self._in_flight: dict[str, _Shared] = {}
        self._closed = False
        self.urls = list(settings.urls)
        """Addresses in use, the same list for the life of the search."""
        self.follows = not settings.urls
        """Whether its retrievers are those registered in Redis."""

    async def follow(self, redis: RedisClient, waits: WaitTimer) -> None:
        """Consume registrations in Redis; produce the retrievers in use; ended by cancellation.

        While Redis is unavailable those of the last answer stay in use.
        """
        from protocol.runtime.redis import processes  # imports redis: settings are read without it
        from protocol.runtime.redis.aio import Backoff
        from protocol.runtime.redis.errors import RedisUnavailable

        backoff = Backoff("reading the registered retrievers", waits)
        while True:
            try:
                self.urls[:] = await processes.ready_urls(redis, "retriever")
            except RedisUnavailable as error:
                await backoff.sleep(error)
                continue
            backoff.reset()
            self.balancer.use(self.urls)
            await asyncio.sleep(processes.PERIOD_S / 2)

    async def __call__(self, query: str) -> SearchResult:
        started = time.monotonic()
        if self._closed:
            return SearchResult((), 0.0, CLOSED)
        shared = self._share(query[:MAX_QUERY_CHARS])
        shared.waiting += 1
        try:
            # Shielded: the cancellation of one trajectory must not cancel the search for the others.
            passages, error = await asyncio.shield(shared.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if shared.task.cancelled() and not (caller and caller.cancelling()):
                return SearchResult((), time.monotonic() - started, CLOSED)
            raise
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.task.done():
                self._give_up(query[:MAX_QUERY_CHARS], shared)
        return SearchResult(passages, time.monotonic() - started, error)

    @property
    def outage(self) -> str:
        return self.balancer.breaker.reason

    @property
    def backpressure(self) -> bool:
        return self.balancer.backpressure

    def report(self, counts: Counter[str], gauges: dict[str, Callable[[], float]]) -> None:
        counts.update(self.balancer.counts)
        self.balancer.counts = counts
        gauges |= self.balancer.gauges()

    async def close(self) -> None:
        self._closed = True
        await cancel_all(shared.task for shared in self._in_flight.values())
        await self.balancer.close()
        await self._transport.close()

    def _share(self, query: str) -> _Shared:
        """Return the search for `query` in flight, or start one."""
        shared = self._in_flight.get(query)
        if shared is not None:
            self.balancer.counts["searches_shared"] += 1
            return shared
        retrying = RetryingQuery(query, self.balancer, self._limits)
        shared = self._in_flight[query] = _Shared(asyncio.create_task(retrying.run(), name="search"))
        shared.task.add_done_callback(lambda _: self._forget(query, shared))
        return shared

    def _give_up(self, query: str, shared: _Shared) -> None:
        # removed at once: the next caller with this query must not join a search that is being cancelled
        self._forget(query, shared)
        shared.task.cancel()

    def _forget(self, query: str, shared: _Shared) -> None:
        if self._in_flight.get(query) is shared:
            del self._in_flight[query]
