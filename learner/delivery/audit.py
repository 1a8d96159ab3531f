"""Whether the books close: verified at every checkpoint, told when they do not, and decisive at the end of a run.

By seq: issued = trained + filtered + stale + dead + in flight. By token: `learner/delivery/token_accounting.py`. Against Redis:
`learner/delivery/audit.py`. Here too, because they happen at the same moments: `meta`, the run's history, and requests.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict, dataclass, replace
from typing import Any

from learner.delivery.dead_letters import History
from learner.delivery.reconciler import Requests
from learner.delivery.redis_accounts import Census
from learner.delivery.state import Books
from learner.delivery.store import RunStore
from protocol.errors import Fenced, StateLost
from protocol.run_meta import RunMeta
from protocol.runtime.redis.errors import RedisFull, RedisUnavailable

# What Redis counted, against what the learner received: the only judge of tokens that is not the learner itself.
#
#     published - received - waiting in the stream = offset,   a constant as long as Redis forgets nothing
#
# `published` is counted by the publishing function, in the same breath as the entry is added. When Redis was restarted,
# wiped or failed over, or this learner goes on from an older checkpoint than the last one, the offset is another one:
# the difference is told and added to `redis_lost`. It is positive for tokens that were published and that no learner
# received, negative for tokens that were received and that Redis has forgotten to have counted. A difference that
# nothing explains is a fault of the books: `look` says so.

log = logging.getLogger(__name__)

TRIES = 3


@dataclass
class Standing:
    """What the checkpoint keeps.

    server, life  which Redis process, and which time since its counters were empty, the offset is of
    lost          tokens by which the offset has moved in all
    rejected      tokens of attempts that were rejected; rejected_seen: what this Redis had counted of them
    """

    server: str = ""
    life: str = ""
    offset: int = 0
    lost: int = 0
    rejected: int = 0
    rejected_seen: int = 0


class CrossCheck:
    """`state` is what a checkpoint says, None where it says nothing; `checkpoint` is its name, "" without one.

    `look` belongs to the training thread, which alone acknowledges; the rest is thread-safe.
    """

    def __init__(
        self,
        store: RunStore,
        books: Books,
        history: History,
        *,
        state: dict[str, Any] | None = None,
        checkpoint: str = "",
    ) -> None:
        self._store, self._books, self._history = store, books, history
        self._standing = Standing(**state) if state else Standing()
        self._adopt = bool(checkpoint) and not state
        self._checkpoint, self._begun = checkpoint, False
        self._ghosts: frozenset[bytes] = frozenset()
        """Entries that are here and that Redis has lost: a resumed learner will not receive them."""

    def look(self) -> str:
        """Compares; "" when nothing is wrong. Raises RedisUnavailable or StateLost, and may be called again."""
        server, census = self._moment()
        books, now = self._books, self._standing
        with books.lock:
            here, received = frozenset(books.unacked), books.law.received
        # what arrived after the census was neither published nor waiting then
        received -= self._store.tokens_of(id_ for id_ in here if _order(id_) > _order(census.last))
        absent = here - census.pending - census.unread.keys()
        ghosts = frozenset(i for i in absent if _order(i) <= _order(census.last) or not self._store.tokens_of([i]))
        waiting = self._store.tokens_of(census.pending - here)
        waiting += sum(tokens for id_, tokens in census.unread.items() if id_ not in here)
        offset = census.published - received - waiting
        same = (server, census.life) == (now.server, now.life)
        same = same and (self._begun or census.commit == self._checkpoint)
        self._begun = True
        with books.lock:
            self._ghosts = ghosts
            self._count_rejected(census.rejected, census.life)
            moved, now.server, now.life = offset - now.offset, server, census.life
            if self._adopt:
                now.offset, self._adopt = offset, False
                return ""
            if not moved:
                return ""
            if same:
                return _problem(moved)
            now.offset, now.lost = offset, now.lost + moved
        text = f"Redis has changed since the last look, and {_problem(moved)}; booked as redis_lost"
        log.warning("%s", text)
        self._history.tell("redis-lost", text)
        return ""

    def _moment(self) -> tuple[str, Census]:
        """The census, and the Redis process that gave it."""
        tries = 0
        while True:
            tries += 1
            server, census = self._store.server(), self._store.census()
            if not census.life:
                self._store.begin_life(uuid.uuid4().hex[:12])
            elif self._store.server() == server or tries > TRIES:
                return server, census

    def update(self) -> None:
        """The rejected tokens as they are now; may be called at any time, by any thread."""
        counted, life = self._store.rejected()
        with self._books.lock:
            if life == self._standing.life:
                self._count_rejected(counted, life)

    def values(self) -> dict[str, float]:
        """Numbers for the metrics."""
        with self._books.lock:
            now = self._standing
            return {"tokens_law_rejected": float(now.rejected), "tokens_law_redis_lost": float(now.lost)}

    def to_state(self) -> dict[str, Any]:
        """Plain JSON values for the checkpoint."""
        with self._books.lock:
            flying = self._books.law.flying.values()
            unseen = sum(arrived.counted for arrived in flying if arrived.id in self._ghosts)
            now = self._standing
            return asdict(replace(now, offset=now.offset + unseen, lost=now.lost + unseen))

    def committed(self, name: str) -> None:
        """A checkpoint of this name is in force: leaves a mark, by which a resumed learner knows that it has the last
        one. Raises RedisUnavailable; without the mark a difference would be told and booked, not called a fault.
        """
        self._store.committed(name)

    def _count_rejected(self, counted: int, life: str) -> None:
        now = self._standing
        again = life != now.life or counted < now.rejected_seen
        now.rejected += counted if again else counted - now.rejected_seen
        now.rejected_seen = counted


def _problem(moved: int) -> str:
    if moved > 0:
        return f"{moved} tokens were published that no learner received"
    return f"{-moved} tokens were received that Redis has not counted as published"


def _order(id_: bytes) -> tuple[int, int]:
    ms, _, number = id_.partition(b"-")
    return int(ms), int(number)


class Audit:
    """Used by the training thread alone, but for `values`."""

    def __init__(
        self, store: RunStore, books: Books, history: History, requests: Requests, cross: CrossCheck, meta: RunMeta
    ) -> None:
        self._store, self._books, self._history = store, books, history
        self._requests, self._cross, self._meta = requests, cross, meta
        self._told = ""

    def begin(self) -> None:
        """The run begins, or goes on. Raises RedisUnavailable or StateLost, and may be called again."""
        self._store.write_meta(self._meta.fields())
        with self._books.lock:
            honoured = sorted(self._books.requests)
        self._requests.committed(honoured)
        self._tell(self._books.check(whole=False) or self._compared())

    def mended(self, why: str, *, epoch: int, lost: bool, again: bool) -> None:
        """All is there again. lost: streams or functions were gone. again: the lease had lapsed and was taken anew.

        Raises RedisUnavailable or StateLost, and may be called again.
        """
        try:
            self._store.write_meta(self._meta.fields())
        except Fenced as error:
            raise StateLost(f"the lease went again: {error}") from error  # whose it is now, regaining it says
        with self._books.lock:
            self._books.tally.state_lost += lost
            self._books.tally.lease_lapsed += again
        if lost:
            self._history.tell("state-lost", f"Redis had lost the run's state, which was made again: {why}")
        if again:
            self._history.tell("epoch", f"the lease had lapsed: epoch {epoch} begins ({why})")

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"redis": self._cross.to_state()}

    def committed(self, state: dict[str, Any], name: str) -> None:
        """The checkpoint `name` with `state` is in force, and what it decided is acknowledged."""
        self._history.tell("checkpoint", f"checkpoint {name} is in force")
        self._requests.committed(state["requests"])
        problem = self._books.check(whole=False)
        try:
            self._cross.committed(name)
            problem = problem or self._cross.look()
        except (RedisUnavailable, StateLost) as error:
            log.info("Redis' counts were not compared: %s", error)
        self._tell(problem)

    def problem(self) -> str:
        """At the end: where the books do not close; "" when they do. Raises RedisUnavailable or StateLost."""
        left = self._books.in_flight()
        return self._books.check() or (f"{len(left)} seqs are left: {left[:10]}" if left else "") or self._cross.look()

    def values(self) -> dict[str, float]:
        """Numbers for the metrics."""
        with self._books.lock:
            values = self._books.law.values() | self._cross.values()
            closes = bool(values["tokens_law_closes"]) and not self._told
            return values | {"tokens_law_closes": float(closes), "books_close": float(closes)}

    def _compared(self) -> str:
        try:
            return self._cross.look()
        except RedisFull as error:
            log.info("Redis' counts were not compared: %s", error)
            return ""

    def _tell(self, problem: str) -> None:
        if problem and problem != self._told:
            log.error("the books do not close: %s", problem)
            self._history.tell("books", f"the books do not close: {problem}")
        self._told = problem
