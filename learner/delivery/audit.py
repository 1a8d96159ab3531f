"""Accounting audits: run at every checkpoint, reported if they fail, and decisive at the end of a run.

By seq: issued = trained + filtered + stale + dead + in flight. By token: `token_accounting.py`. Against Redis:

    published - received - waiting in the stream = offset,   a constant as long as Redis loses nothing

The publishing function counts `published` atomically with adding the entry. The offset changes if Redis was restarted,
wiped or failed over, or if this learner resumed from an older checkpoint than the last one. The difference is logged
and added to `redis_lost`: positive for published tokens that no learner received, negative for received tokens whose
count Redis has lost. A difference without such an explanation is an accounting error: `RedisAudit.compare` reports it.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict, dataclass, replace
from typing import Any

from learner.delivery.dead_letters import EventLog
from learner.delivery.reconciler import RequeueRequests
from learner.delivery.redis_accounts import Census
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore, entry_order
from protocol.errors import Fenced, StateLost
from protocol.run_meta import RunMeta
from protocol.runtime.redis.errors import RedisFull, RedisUnavailable

log = logging.getLogger(__name__)

TRIES = 3


@dataclass
class RedisOffset:
    """State of the audit in the checkpoint.

    server, life  Redis process, and lifetime of its counters, to which the offset belongs
    lost          total change of the offset, in tokens
    rejected      tokens of rejected attempts; rejected_seen: the part that this Redis has counted
    """

    server: str = ""
    life: str = ""
    offset: int = 0
    lost: int = 0
    rejected: int = 0
    rejected_seen: int = 0


class RedisAudit:
    """`state` is from the checkpoint, None if it has none; `checkpoint` is its name, "" without one.

    Only the training thread, which acknowledges, may call `compare`; the rest is thread-safe.
    """

    def __init__(
        self,
        store: RunStore,
        delivery: DeliveryState,
        event_log: EventLog,
        *,
        state: dict[str, Any] | None = None,
        checkpoint: str = "",
    ) -> None:
        self._store, self._delivery, self._event_log = store, delivery, event_log
        self._offset = RedisOffset(**state) if state else RedisOffset()
        self._adopt = bool(checkpoint) and not state
        self._checkpoint, self._begun = checkpoint, False
        self._lost_entries: frozenset[bytes] = frozenset()
        """Received entries that Redis has lost: a resumed learner will not receive them."""

    def compare(self) -> str:
        """Compare with Redis; return the problem, or "". Raises RedisUnavailable or StateLost, and may be retried."""
        server, census = self._moment()
        delivery, now = self._delivery, self._offset
        with delivery.lock:
            here, received = frozenset(delivery.unacked), delivery.accounting.received_counted
        # entries that arrived after the census were neither published nor waiting then
        received -= self._store.tokens_of(id_ for id_ in here if entry_order(id_) > entry_order(census.last))
        absent = here - census.pending - census.unread.keys()
        lost_entries = frozenset(
            i for i in absent if entry_order(i) <= entry_order(census.last) or not self._store.tokens_of([i])
        )
        waiting = self._store.tokens_of(census.pending - here)
        waiting += sum(tokens for id_, tokens in census.unread.items() if id_ not in here)
        offset = census.published - received - waiting
        same = (server, census.life) == (now.server, now.life)
        same = same and (self._begun or census.commit == self._checkpoint)
        self._begun = True
        with delivery.lock:
            self._lost_entries = lost_entries
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
        text = f"Redis lost state since the last audit: {_problem(moved)}; counted as redis_lost"
        log.warning("%s", text)
        self._event_log.emit("redis-lost", text)
        return ""

    def _moment(self) -> tuple[str, Census]:
        """Return the Redis process and its census, taken from the same process."""
        tries = 0
        while True:
            tries += 1
            server, census = self._store.server(), self._store.census()
            if not census.life:
                self._store.begin_life(uuid.uuid4().hex[:12])
            elif self._store.server() == server or tries > TRIES:
                return server, census

    def update(self) -> None:
        """Count the tokens of rejected attempts; callable at any time from any thread."""
        counted, life = self._store.rejected()
        with self._delivery.lock:
            if life == self._offset.life:
                self._count_rejected(counted, life)

    def values(self) -> dict[str, float]:
        """Return numbers for the metrics."""
        with self._delivery.lock:
            now = self._offset
            return {"token_accounting_rejected": float(now.rejected), "token_accounting_redis_lost": float(now.lost)}

    def to_state(self) -> dict[str, Any]:
        """Plain JSON values for the checkpoint."""
        with self._delivery.lock:
            flying = self._delivery.accounting.pending.values()
            unseen = sum(arrived.counted for arrived in flying if arrived.id in self._lost_entries)
            now = self._offset
            return asdict(replace(now, offset=now.offset + unseen, lost=now.lost + unseen))

    def committed(self, name: str) -> None:
        """Mark checkpoint `name` as current, by which a resumed learner knows that it has the last one.
        Raises RedisUnavailable; without the mark a difference would count as lost by Redis, not as an error.
        """
        self._store.committed(name)

    def _count_rejected(self, counted: int, life: str) -> None:
        now = self._offset
        again = life != now.life or counted < now.rejected_seen
        now.rejected += counted if again else counted - now.rejected_seen
        now.rejected_seen = counted


def _problem(moved: int) -> str:
    if moved > 0:
        return f"{moved} published tokens were received by no learner"
    return f"{-moved} received tokens are not counted as published in Redis"


class AccountingAudit:
    """Runs all audits of a run when they are due. Other threads may only call `values`."""

    def __init__(
        self,
        store: RunStore,
        delivery: DeliveryState,
        event_log: EventLog,
        requests: RequeueRequests,
        cross: RedisAudit,
        meta: RunMeta,
    ) -> None:
        self._store, self._delivery, self._event_log = store, delivery, event_log
        self._requests, self._cross, self._meta = requests, cross, meta
        self._reported = ""

    def begin(self) -> None:
        """Audit the run when it begins or resumes. Raises RedisUnavailable or StateLost, and may be retried."""
        self._store.write_meta(self._meta.fields())
        with self._delivery.lock:
            honoured = sorted(self._delivery.requeue_requests)
        self._requests.committed(honoured)
        self._report(self._delivery.inconsistency(whole=False) or self._compared())

    def repaired(self, why: str, *, epoch: int, lost: bool, lapsed: bool) -> None:
        """Record a repair. lost: streams or functions were missing; lapsed: the lease was acquired again.

        Raises RedisUnavailable or StateLost, and may be retried.
        """
        try:
            self._store.write_meta(self._meta.fields())
        except Fenced as error:
            raise StateLost(
                f"the lease was lost again: {error}"
            ) from error  # `LearnerLease.reacquire` reports the new holder
        with self._delivery.lock:
            self._delivery.counters.state_lost += lost
            self._delivery.counters.lease_lapsed += lapsed
        if lost:
            self._event_log.emit("state-lost", f"Redis had lost the run's state; it was restored: {why}")
        if lapsed:
            self._event_log.emit("epoch", f"the lease had expired: epoch {epoch} begins ({why})")

    def to_state(self) -> dict[str, Any]:
        """Return the audits' state for a checkpoint."""
        return {"redis": self._cross.to_state()}

    def committed(self, state: dict[str, Any], name: str) -> None:
        """Audit after checkpoint `name` with `state` is current and its entries are acknowledged."""
        self._event_log.emit("checkpoint", f"checkpoint {name} is current")
        self._requests.committed(state["requests"])
        problem = self._delivery.inconsistency(whole=False)
        try:
            self._cross.committed(name)
            problem = problem or self._cross.compare()
        except (RedisUnavailable, StateLost) as error:
            log.info("skipped the comparison with Redis' counts: %s", error)
        self._report(problem)

    def problem(self) -> str:
        """Return the inconsistency of the accounting at the end of the run, "" if there is none. Raises
        RedisUnavailable."""
        left = self._delivery.in_flight()
        return (
            self._delivery.inconsistency()
            or (f"{len(left)} seqs are not settled: {left[:10]}" if left else "")
            or self._cross.compare()
        )

    def values(self) -> dict[str, float]:
        """Return numbers for the metrics."""
        with self._delivery.lock:
            values = self._delivery.accounting.values() | self._cross.values()
            closes = bool(values["token_accounting_consistent"]) and not self._reported
            return values | {"token_accounting_consistent": float(closes), "accounting_consistent": float(closes)}

    def _compared(self) -> str:
        try:
            return self._cross.compare()
        except RedisFull as error:
            log.info("skipped the comparison with Redis' counts: %s", error)
            return ""

    def _report(self, problem: str) -> None:
        if problem and problem != self._reported:
            log.error("the accounting is not consistent: %s", problem)
            self._event_log.emit("inconsistent", f"the accounting is not consistent: {problem}")
        self._reported = problem
