"""Seqs that are issued again: those that are found nowhere, and those that people ask for.

The first covers what no other rule does: a task that a person deleted, a Redis that lost its last second, an entry
delivered to a learner that died. Being wrong costs one rollout, never a second training: the ledger sees to that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import EventLog
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol.codec import number_of
from protocol.ledger import NotReopenable
from protocol.runtime.redis.errors import BestEffort, RedisUnavailable

log = logging.getLogger(__name__)

AHEAD_S = 86_400.0
"""Ids of entries may be ahead of the clock by this much: clocks are set back, a failover may find another one."""


class MissingSeqReconciler:
    """Compares what was issued with where it is. `tick` is called every `reconcile_s` seconds."""

    def __init__(self, store: RunStore, delivery: DeliveryState, source: StreamConsumer, event_log: EventLog) -> None:
        self._store, self._delivery, self._source, self._event_log = store, delivery, source, event_log
        self._missing_once: frozenset[int] = frozenset()
        self._ahead_logged = False

    def tick(self) -> list[int]:
        """Make seqs due again that were missing twice in a row, and return them."""
        found = self._store.snapshot()
        if found.ahead_s > AHEAD_S and not self._ahead_logged:
            self._ahead_logged = True
            text = f"ids in {self._store.keys.traj} are {found.ahead_s:.0f} s ahead of Redis' clock, which makes them"
            log.warning("%s: entries were added by hand, or the clock was set back; delivery goes on", text)
            self._event_log.emit("ids-ahead", text)
        if found.foreign_consumers:
            # Delivered to a learner that lost the lease: it will never acknowledge them.
            self._source.reclaim.set()
        if found.unread or found.foreign_consumers or not self._source.caught_up:
            # Unread entries may be of any seq. While there are some, training does not starve either.
            self._missing_once = frozenset()
            return []
        delivery = self._delivery
        with delivery.lock:
            # no further than credit reaches: what lies beyond is not needed yet, however much is said to be issued
            open_ = delivery.ledger.missing(min(delivery.issued, delivery.credit))
            missing = frozenset(open_) - delivery.pending - delivery.due - found.tasks
            again = sorted(missing & self._missing_once)
            for seq in again:
                delivery.attempts[seq] = delivery.attempts.get(seq, 1) + 1
                delivery.due.add(seq)
        self._missing_once = missing - frozenset(again)
        if again:
            log.warning("%d seqs were issued and found nowhere, issuing them again: %s", len(again), again[:10])
            self._event_log.emit("reissued", f"{len(again)} seqs were issued and found nowhere: {again[:10]}")
        return again


class RequeueRequests:
    """Tries seqs that were given up again, as people ask for (`foray dlq requeue`, or SADD on `Keys.requeue`).

    A request stays in Redis until a durable checkpoint says that it was honoured; the same checkpoint says so when the
    request could not be removed any more. So a crash in between honours it once, not twice and not never. `tick` is
    called each second by the maintenance thread while tasks are issued; the rest belongs to the training thread.
    """

    def __init__(self, store: RunStore, delivery: DeliveryState, event_log: EventLog) -> None:
        self._store, self._delivery, self._event_log = store, delivery, event_log
        self._best_effort = BestEffort()

    def tick(self) -> None:
        """Honour what can be honoured, and remove what cannot. Raises RedisUnavailable."""
        refused: list[bytes] = []
        for raw in self._store.requests():
            seq = number_of(raw)
            try:
                with self._delivery.lock:
                    if seq in self._delivery.requeue_requests:
                        continue  # honoured, and not in a checkpoint yet
                    was = self._delivery.reopen(seq)
                self._event_log.emit("requeued", f"seq {seq} was {was} and is tried again")
                log.info("seq %d was %s and is tried again, as a person asked", seq, was)
            except NotReopenable as error:
                shown = raw[:40].decode("utf-8", "replace")
                self._event_log.emit("requeue-refused", f"{shown}: {error}")
                log.warning("the request to try %r again is dropped: %s", shown, error)
                refused.append(raw)
        self._store.drop_requests(refused)

    def committed(self, seqs: Iterable[int]) -> None:
        """A durable checkpoint has these: their requests are dealt with."""
        done = list(seqs)
        try:
            if not self._best_effort(lambda: self._store.drop_requests(done)):
                return
        except RedisUnavailable as error:
            log.info("requests that were honoured are removed later: %s", error)
            return
        with self._delivery.lock:
            self._delivery.requeue_requests.difference_update(done)
