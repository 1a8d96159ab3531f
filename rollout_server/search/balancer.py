"""Which replica a search goes to, and when: windows, health, one line of waiting searches, probes.

    enter --(a usable replica with room, the least busy first)--> Place --> done | failed | left
      |  none has room: in line, first come first served
      |  none is usable: raises Away; `somebody` is the event to wait for

    loop           consumes            produces               waits for                unblocked by
    _bring_back    a replica aside     a usable replica       growing pauses, probe    the clock, its answer
    _look          a doubtful failure  aside, or nothing      one probe                its answer
Both are tasks of their own, at most one a replica, ended by `close`.
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

from rollout_server.search.base import NO_SUCH_PATH, OVERLOADED, TIMEOUT, Fault, Names
from rollout_server.search.limiter import Window
from rollout_server.search.replica import Proof, Replica, Verdict, probe, read_fingerprint
from rollout_server.search.transport import Wire

# The circuit breaker over all replicas: open while none of them can be used. Pure.
#
#     closed     --(the last usable replica is put aside)--> open
#     open       --(a probe is sent)-->                      half open --(it fails)--> open
#     half open  --(it succeeds)-->                          closed, with a small window at that replica
#
# While it is not closed, searches wait in their places and no new task is leased: an outage costs time and not rewards.


class State(StrEnum):
    """`gauge` is what the metric shows."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"

    @property
    def gauge(self) -> float:
        return {State.CLOSED: 0.0, State.HALF_OPEN: 0.5, State.OPEN: 1.0}[self]


class Breaker:
    """Reads the replicas; nothing is stored twice, so the two cannot disagree."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    def usable(self) -> bool:
        """Whether any replica may be asked."""
        return any(replica.up for replica in self._replicas)

    @property
    def state(self) -> State:
        if self.usable:
            return State.CLOSED
        return State.HALF_OPEN if any(replica.looking for replica in self._replicas) else State.OPEN

    @property
    def reason(self) -> str:
        """Why it is not closed, "" when it is: each address with its cause."""
        if self.state is State.CLOSED:
            return ""
        return ", ".join(f"{replica.cause} at {replica.url}" for replica in self._replicas)


log = logging.getLogger(__name__)


REMIND_S = 60.0
"""How often it is said that an address is wrong, as long as it is."""


class Away(Exception):
    """No replica can be used."""


@dataclass(frozen=True)
class Place:
    """Permission to send one request to `replica`; `number` is its window's."""

    replica: Replica
    number: int


@dataclass(frozen=True)
class _Waiting:
    granted: asyncio.Future[Place]
    avoid: Collection[str]


class Governor:
    """See the module. Belongs to one event loop, from the first `enter` on.

    ceiling     most requests in flight at one replica
    attempt_s   time of one attempt, and of a probe by a query
    probe_s     time of any other probe
    """

    def __init__(self, wire: Wire, urls: Sequence[str], *, ceiling: int, attempt_s: float, probe_s: float) -> None:
        self._wire, self._attempt_s, self._probe_s = wire, attempt_s, probe_s
        self.replicas = [Replica(url, Window(ceiling=ceiling, patience_s=attempt_s)) for url in urls]
        self.breaker = Breaker(self.replicas)
        self.somebody = asyncio.Event()
        self.somebody.set()
        self.counts: Counter[str] = Counter()
        self._names = Names()
        self._line: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fingerprints: set[str] = set()
        self._asked_for_name = False

    async def enter(self, avoid: Collection[str]) -> Place:
        """A place at a replica, at one whose address is not in `avoid` where there is a choice. Raises Away.

        Waits for an answer that frees a place, or for a replica that comes back. May be cancelled at any time.
        """
        if not self.breaker.usable:
            raise Away
        if not self._asked_for_name:
            self._asked_for_name = True
            for known in self.replicas:
                self._start(self._learn_name(known), "search-info")
        replica = None if self._line else self._choose(avoid)
        if replica is not None:
            return Place(replica, replica.window.send())
        waiting = _Waiting(asyncio.get_running_loop().create_future(), avoid)
        self._line.append(waiting)
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            if waiting in self._line:
                self._line.remove(waiting)
            elif waiting.granted.done() and not waiting.granted.cancelled() and not waiting.granted.exception():
                self.left(waiting.granted.result())
            raise

    def done(self, place: Place, query: str, latency_s: float) -> None:
        """The request was answered as it should be."""
        place.replica.window.answered(place.number, latency_s)
        place.replica.succeeded(query)
        self._serve_line()

    def failed(self, place: Place, fault: Fault, latency_s: float) -> None:
        """It was not. Puts the replica aside, or has it looked at, when that is what the failures say."""
        replica = place.replica
        self.counts[f"search_faults_{self._names(fault.cause)}"] += 1
        if fault.cause in (OVERLOADED, TIMEOUT):
            replica.window.refused(place.number)
        elif fault.served:
            replica.window.answered(place.number, latency_s)
        else:
            replica.window.ended()
        verdict = replica.failed(fault)
        if verdict is Verdict.DOWN:
            self._went_down(replica)
        elif verdict is Verdict.DOUBTFUL:
            replica.looking = True
            self._start(self._look(replica), "search-look")
        self._serve_line()

    def left(self, place: Place) -> None:
        """The request was given up, or never sent."""
        place.replica.window.ended()
        self._serve_line()

    def has_other(self, than: Collection[str]) -> bool:
        """Whether a replica can be used whose address is not among these."""
        return any(replica.up and replica.url not in than for replica in self.replicas)

    @property
    def waiting(self) -> int:
        """Searches in line."""
        return len(self._line)

    @property
    def congested(self) -> bool:
        """Whether more searches stand in line than may be in flight: whoever comes now waits a round trip and more."""
        return self.waiting > sum(replica.window.size for replica in self.replicas if replica.up)

    def gauges(self) -> dict[str, Callable[[], float]]:
        """What can be read at any moment."""
        replicas = self.replicas
        return {
            "search_window": lambda: sum(r.window.size for r in replicas if r.up),
            "searches_in_flight": lambda: sum(r.window.in_flight for r in replicas),
            "searches_in_line": lambda: self.waiting,
            "retrievers": lambda: len(replicas),
            "retrievers_healthy": lambda: sum(r.up for r in replicas),
            "retriever_fingerprints": lambda: len({r.fingerprint for r in replicas if r.fingerprint}),
            "search_breaker": lambda: self.breaker.state.gauge,
        }

    async def close(self) -> None:
        """End the probes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _choose(self, avoid: Collection[str]) -> Replica | None:
        free = [replica for replica in self.replicas if replica.up and replica.window.room()]
        if not free:
            return None
        return min(free, key=lambda r: (r.url in avoid, r.window.in_flight, random.random()))

    def _serve_line(self) -> None:
        while self._line:
            waiting = self._line[0]
            if not waiting.granted.done():
                replica = self._choose(waiting.avoid)
                if replica is None:
                    return
                waiting.granted.set_result(Place(replica, replica.window.send()))
            self._line.popleft()

    def _went_down(self, replica: Replica) -> None:
        if replica.cause not in NO_SUCH_PATH:
            log.warning("retriever %s is put aside: %s", replica.url, replica.cause)
        self.counts["retrievers_put_aside"] += 1
        self._start(self._bring_back(replica), "search-probe")
        if self.breaker.usable:
            return
        log.warning("no retriever can be used (%s): searches wait, and no new task is leased", self.breaker.reason)
        self.counts["search_outages"] += 1
        self.somebody.clear()
        while self._line:
            granted = self._line.popleft().granted
            if not granted.done():
                granted.set_exception(Away())

    async def _look(self, replica: Replica) -> None:
        try:
            cause = await self._probe(replica, Proof.READY)
        finally:
            replica.looking = False
        if cause and replica.up:
            replica.put_aside(cause, Proof.READY)
            self._went_down(replica)

    async def _bring_back(self, replica: Replica) -> None:
        told = -REMIND_S
        while True:
            now = asyncio.get_running_loop().time()
            if replica.cause in NO_SUCH_PATH and now >= told + REMIND_S:
                told = now
                log.error(
                    "retriever %s has no POST %s (%s): correct rollout.search.urls (the part before that path) or "
                    "rollout.search.dialect; no query is sent there meanwhile",
                    *(replica.url, self._wire.path, replica.cause),
                )
            # jitter: the rollout servers of a run must not come in step
            await asyncio.sleep(replica.next_pause() * random.uniform(0.5, 1.0))
            replica.looking = True
            try:
                cause = await self._probe(replica, replica.proof)
            finally:
                replica.looking = False
            if not cause:
                break
            replica.cause = cause
        replica.bring_back()
        log.warning("retriever %s can be used again", replica.url)
        self.somebody.set()
        self._serve_line()
        await self._learn_name(replica)

    async def _probe(self, replica: Replica, proof: Proof) -> str:
        return await probe(self._wire, replica, proof, look_s=self._probe_s, query_s=self._attempt_s)

    async def _learn_name(self, replica: Replica) -> None:
        """Which index it serves: answers that depend on the replica, or change with a restart, are worth a warning."""
        name = await read_fingerprint(self._wire, replica, self._probe_s)
        if not name:
            return
        replica.fingerprint = name
        if self._fingerprints - {name} and name not in self._fingerprints:
            log.warning(
                "retriever %s serves another index (%s) than %s", replica.url, name, ", ".join(self._fingerprints)
            )
        self._fingerprints.add(name)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a look at a retriever broke", exc_info=error)
