"""One search query: attempts, back-off and outages, each with a separate time limit."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from protocol.runtime.timing import LoopClock, backoff_s, loop_timeout, ticking
from protocol.search import Passage
from rollout_server.search.balancer import NoHealthyReplica, ReplicaBalancer
from rollout_server.search.base import TIMEOUT, UNAVAILABLE, SearchError

BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
QueryResult = tuple[tuple[Passage, ...], str]
"""(passages, ""), or ((), cause)."""


@dataclass(frozen=True)
class QueryLimits:
    """Limits of one query.

    deadline_s     total time for queueing, attempts and back-off while a replica is healthy
    attempt_s      timeout of one attempt
    outage_wait_s  maximum wait while no replica is healthy; the deadline is extended by the time waited
    attempts       number of invalid answers after which the query fails
    """

    deadline_s: float
    attempt_s: float
    outage_wait_s: float
    attempts: int


class RetryingQuery:
    """A query with retries. Call `run` once."""

    def __init__(self, query: str, balancer: ReplicaBalancer, limits: QueryLimits) -> None:
        self._query, self._balancer, self._limits = query, balancer, limits
        self._now = LoopClock.current().time
        self._deadline = self._now() + limits.deadline_s
        self._outage_left = limits.outage_wait_s
        self._failed_at: set[str] = set()
        self._bad_answers = 0
        self._failures = 0
        self._cause = TIMEOUT

    async def run(self) -> QueryResult:
        """Return passages, or none with the cause, within deadline_s + outage_wait_s. Raises only CancelledError."""
        with ticking():
            while True:
                try:
                    return await self._attempt(), ""
                except NoHealthyReplica:
                    if not await self._wait_for_replica():
                        return (), UNAVAILABLE
                except TimeoutError:
                    # queued until the deadline: the cause of an earlier attempt is more informative
                    return (), self._cause
                except SearchError as error:
                    self._cause = error.cause
                    if not await self._should_retry(error):
                        return (), error.cause

    @property
    def _left(self) -> float:
        return self._deadline - self._now()

    async def _attempt(self) -> tuple[Passage, ...]:
        """Send one request. Raises SearchError, NoHealthyReplica, or TimeoutError at the deadline in the queue."""
        async with loop_timeout(max(0.0, self._left)):
            permit = await self._balancer.acquire(self._failed_at)
        started = self._now()
        try:
            time_s = max(0.001, min(self._limits.attempt_s, self._left))
            passages = await permit.replica.batcher.search(self._query, time_s)
        except SearchError as error:
            self._failed_at.add(permit.replica.url)
            self._balancer.failed(permit, error, self._now() - started)
            raise
        except BaseException:
            self._balancer.release(permit)
            raise
        self._balancer.succeeded(permit, self._query, self._now() - started)
        return passages

    async def _should_retry(self, error: SearchError) -> bool:
        """Return whether to try again, after the pause before the next attempt.

        Always True if this failure ejected the last replica: only the next attempt can show whether the query or the
        retriever caused the failure.
        """
        outage = not self._balancer.breaker.usable
        self._bad_answers += error.served
        if not outage and (not error.retryable or self._bad_answers >= self._limits.attempts):
            return False
        # Jitter: thousands of trajectories must not retry together. Retry-After is of the replica that sent it.
        retry_after_s = 0.0 if self._balancer.has_other(self._failed_at) else error.retry_after_s
        self._failures += 1
        wait = max(retry_after_s, random.uniform(0.5, 1.0) * backoff_s(self._failures, BACKOFF_S, MAX_BACKOFF_S))
        if outage:
            return True
        if wait >= self._left:
            return False
        self._balancer.counts["search_retries"] += 1
        await asyncio.sleep(wait)
        return True

    async def _wait_for_replica(self) -> bool:
        """Wait until a replica is healthy. Return False if that takes longer than the rest of outage_wait_s."""
        started = self._now()
        try:
            async with loop_timeout(max(0.0, self._outage_left)):
                await self._balancer.any_healthy.wait()
        except TimeoutError:
            return False
        waited = self._now() - started
        self._outage_left -= waited
        self._deadline += waited
        self._failed_at.clear()
        self._failures = 0
        return True
