"""Load balancer over the retrievers: concurrency limits, outlier ejection, a queue of waiting searches, probes.

    acquire --(the least busy healthy replica with capacity)--> Permit --> succeeded | failed | release
      |  none has capacity: queued, first in, first out
      |  none is healthy: raises NoHealthyReplica; `any_healthy` is the event to wait for

    loop                    consumes             produces              waits for               unblocked by
    _readmit_when_healthy   an ejected replica   a healthy replica     growing pauses, probe   the clock, its answer
    _check_health           a doubtful failure   an ejection or none   one probe               its answer
Each runs as a task, at most one per replica, ended by `close`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from protocol.runtime.lifecycle import cancel_all
from rollout_server.search.base import KNOWN, NO_FILES, NO_SUCH_PATH, OVERLOADED, TIMEOUT, CauseLabels, SearchError
from rollout_server.search.batching import QueryBatcher
from rollout_server.search.limiter import GradientLimit
from rollout_server.search.replica import HealthCheck, HealthVerdict, Replica, probe, read_info
from rollout_server.search.transport import SearchTransport

log = logging.getLogger(__name__)

NONE = "no retriever is registered in Redis"
REMIND_S = 60.0
"""Interval at which a wrong address is logged, in seconds."""


class BreakerState(StrEnum):
    """State of the circuit breaker. `gauge` is its value in the metrics."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"

    @property
    def gauge(self) -> float:
        return {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}[self]


class CircuitBreaker:
    """The circuit breaker over all replicas: open while none of them is healthy.

    closed     --(the last healthy replica is ejected)--> open
    open       --(a probe is sent)-->                     half open --(it fails)--> open
    half open  --(it succeeds)-->                         closed, with a small limit at that replica

    While it is not closed, searches wait and no new task is leased: an outage costs time, not rewards. The state is
    derived from the replicas, so it is always consistent with them.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    def usable(self) -> bool:
        """Whether any replica is healthy."""
        return any(replica.healthy for replica in self._replicas)

    @property
    def state(self) -> BreakerState:
        if self.usable:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if any(replica.probing for replica in self._replicas) else BreakerState.OPEN

    @property
    def reason(self) -> str:
        """Each address with the cause of its ejection; "" while the breaker is closed."""
        if self.state is BreakerState.CLOSED:
            return ""
        return ", ".join(f"{replica.cause} at {replica.url}" for replica in self._replicas) or NONE


class NoHealthyReplica(Exception):
    """Every replica is ejected."""


@dataclass(frozen=True)
class Permit:
    """Permission to send one query to `replica`. `number` identifies the query in `replica.limit`."""

    replica: Replica
    number: int


@dataclass(frozen=True)
class _Waiter:
    permit: asyncio.Future[Permit]
    avoid: Collection[str]


class ReplicaBalancer:
    """Chooses a replica for each search. Bound to one event loop after the first `acquire`.

    ceiling     maximum number of queries in flight at one replica
    attempt_s   timeout of an attempt, and of a probe that sends a query
    probe_s     timeout of any other probe
    """

    def __init__(
        self, transport: SearchTransport, urls: Sequence[str], *, ceiling: int, attempt_s: float, probe_s: float
    ) -> None:
        self._transport, self._attempt_s, self._probe_s, self._ceiling = transport, attempt_s, probe_s, ceiling
        self.replicas: list[Replica] = []
        self.breaker = CircuitBreaker(self.replicas)
        self.any_healthy = asyncio.Event()
        self.counts: Counter[str] = Counter({f"search_faults_{cause}": 0 for cause in KNOWN})
        self._labels = CauseLabels()
        self._queue: deque[_Waiter] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fingerprints: set[str] = set()
        self._info_requested = False
        self.use(urls)

    def use(self, urls: Sequence[str]) -> None:
        """Send queries to `urls` from now on: new ones join as healthy, others are dropped."""
        wanted = list(dict.fromkeys(url.rstrip("/") for url in urls))
        known = {replica.url: replica for replica in self.replicas}
        if set(wanted) == set(known):
            return
        was_usable = self.breaker.usable
        # in place: breaker and gauges refer to this list
        self.replicas[:] = [known.get(url) or self._replica(url) for url in wanted]
        for replica in self.replicas:
            if replica.url not in known and self._info_requested:
                self._start(self._read_info(replica), "search-info")
        if self.breaker.usable:
            self.any_healthy.set()
            self._serve_queue()
        elif was_usable:
            self._on_outage()

    def _replica(self, url: str) -> Replica:
        limit = GradientLimit(ceiling=self._ceiling, timeout_s=self._attempt_s)
        batcher = QueryBatcher(self._transport, url, ceiling=self._ceiling, attempt_s=self._attempt_s)
        return Replica(url, limit, batcher)

    async def acquire(self, avoid: Collection[str]) -> Permit:
        """Return a permit, if possible for a replica whose address is not in `avoid`.

        Waits until a request ends or a replica is readmitted. May be cancelled at any time. Raises NoHealthyReplica.
        """
        if not self.breaker.usable:
            raise NoHealthyReplica
        if not self._info_requested:
            self._info_requested = True
            for known in self.replicas:
                self._start(self._read_info(known), "search-info")
        replica = None if self._queue else self._choose(avoid)
        if replica is not None:
            return Permit(replica, replica.limit.acquire())
        waiter = _Waiter(asyncio.get_running_loop().create_future(), avoid)
        self._queue.append(waiter)
        try:
            return await waiter.permit
        except asyncio.CancelledError:
            if waiter in self._queue:
                self._queue.remove(waiter)
            elif waiter.permit.done() and not waiter.permit.cancelled() and not waiter.permit.exception():
                self.release(waiter.permit.result())
            raise

    def succeeded(self, permit: Permit, query: str, latency_s: float) -> None:
        """Record that the request was answered correctly."""
        permit.replica.limit.on_success(permit.number, latency_s)
        permit.replica.succeeded(query)
        self._serve_queue()

    def failed(self, permit: Permit, error: SearchError, latency_s: float) -> None:
        """Record that the request failed. Ejects or probes the replica if its failures call for it."""
        replica = permit.replica
        self.counts[f"search_faults_{self._labels(error.cause)}"] += 1
        if error.cause in (OVERLOADED, TIMEOUT):
            replica.limit.on_dropped(permit.number)
        elif error.served:
            replica.limit.on_success(permit.number, latency_s)
        else:
            replica.limit.on_ignored()
        verdict = replica.failed(error) if replica in self.replicas else HealthVerdict.FINE
        if verdict is HealthVerdict.DOWN:
            self._on_ejected(replica)
        elif verdict is HealthVerdict.DOUBTFUL:
            replica.probing = True
            self._start(self._check_health(replica), "search-look")
        self._serve_queue()

    def release(self, permit: Permit) -> None:
        """Return the permit of a request that was cancelled or never sent."""
        permit.replica.limit.on_ignored()
        self._serve_queue()

    def has_other(self, than: Collection[str]) -> bool:
        """Return whether there is a healthy replica with another address than these."""
        return any(replica.healthy and replica.url not in than for replica in self.replicas)

    @property
    def waiting(self) -> int:
        """Number of searches in the queue."""
        return len(self._queue)

    @property
    def backpressure(self) -> bool:
        """Whether more searches are queued than may be in flight: a new one would wait for a round trip or more."""
        return self.waiting > sum(replica.limit.size for replica in self.replicas if replica.healthy)

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return the gauges by name. Each can be read at any time."""
        replicas = self.replicas
        return {
            "search_window": lambda: sum(r.limit.size for r in replicas if r.healthy),
            "searches_in_flight": lambda: sum(r.limit.in_flight for r in replicas),
            "searches_queued": lambda: self.waiting,
            "retrievers": lambda: len(replicas),
            "retrievers_healthy": lambda: sum(r.healthy for r in replicas),
            "retriever_fingerprints": lambda: len({r.fingerprint for r in replicas if r.fingerprint}),
            "search_breaker": lambda: self.breaker.state.gauge,
        }

    async def close(self) -> None:
        """Stop the probes, and the requests that no caller waits for any more."""
        await cancel_all(self._tasks)
        for replica in self.replicas:
            await replica.batcher.close()

    def _choose(self, avoid: Collection[str]) -> Replica | None:
        free = [replica for replica in self.replicas if replica.healthy and replica.limit.has_capacity()]
        if not free:
            return None
        return min(free, key=lambda r: (r.url in avoid, r.limit.in_flight, random.random()))

    def _serve_queue(self) -> None:
        while self._queue:
            waiter = self._queue[0]
            if not waiter.permit.done():
                replica = self._choose(waiter.avoid)
                if replica is None:
                    return
                waiter.permit.set_result(Permit(replica, replica.limit.acquire()))
            self._queue.popleft()

    def _on_ejected(self, replica: Replica) -> None:
        if replica.cause not in NO_SUCH_PATH:
            log.warning("ejecting retriever %s: %s", replica.url, replica.cause)
        self.counts["retriever_ejections"] += 1
        self._start(self._readmit_when_healthy(replica), "search-probe")
        if not self.breaker.usable:
            self._on_outage()

    def _on_outage(self) -> None:
        log.warning("no healthy retriever (%s): searches wait, and no new task is leased", self.breaker.reason)
        self.counts["search_outages"] += 1
        self.any_healthy.clear()
        while self._queue:
            permit = self._queue.popleft().permit
            if not permit.done():
                permit.set_exception(NoHealthyReplica())

    async def _check_health(self, replica: Replica) -> None:
        try:
            cause = await self._probe(replica, HealthCheck.READY)
        finally:
            replica.probing = False
        if cause not in ("", NO_FILES) and replica.healthy and replica in self.replicas:
            replica.eject(cause, HealthCheck.READY)
            self._on_ejected(replica)

    async def _readmit_when_healthy(self, replica: Replica) -> None:
        logged_at = -REMIND_S
        while replica in self.replicas:
            now = asyncio.get_running_loop().time()
            if replica.cause in NO_SUCH_PATH and now >= logged_at + REMIND_S:
                logged_at = now
                log.error(
                    "retriever %s has no POST %s (%s): correct rollout.search.urls (the part before that path) or "
                    "rollout.search.dialect; it gets no queries until then",
                    *(replica.url, self._transport.path, replica.cause),
                )
            # jitter: the rollout servers of a run must not probe at the same time
            await asyncio.sleep(replica.next_pause() * random.uniform(0.5, 1.0))
            replica.probing = True
            try:
                cause = await self._probe(replica, replica.health_check)
            finally:
                replica.probing = False
            if not cause:
                break
            replica.cause = cause
        else:
            return  # dropped
        replica.readmit()
        log.warning("retriever %s is healthy again", replica.url)
        self.any_healthy.set()
        self._serve_queue()
        await self._read_info(replica)

    async def _probe(self, replica: Replica, health_check: HealthCheck) -> str:
        return await probe(self._transport, replica, health_check, ready_s=self._probe_s, query_s=self._attempt_s)

    async def _read_info(self, replica: Replica) -> None:
        """Record what the replica serves. Warn if its index differs: answers would depend on the replica."""
        fingerprint = await read_info(self._transport, replica, self._probe_s)
        if not fingerprint:
            return
        replica.fingerprint = fingerprint
        if self._fingerprints - {fingerprint} and fingerprint not in self._fingerprints:
            log.warning(
                "retriever %s serves a different index (%s) than the others (%s)",
                *(replica.url, fingerprint, ", ".join(self._fingerprints)),
            )
        self._fingerprints.add(fingerprint)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected error in a probe of a retriever", exc_info=error)
