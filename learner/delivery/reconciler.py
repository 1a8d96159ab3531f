"""Reissue seqs: those that are lost, and those requested by users.

Lost seqs are the cases that no other rule covers: a task deleted manually, a Redis that lost its last second, an entry
delivered to a learner that crashed. A wrong guess costs one rollout, never a second training: the ledger prevents that.
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
"""Tolerated lead of entry ids over Redis' clock, in seconds: clocks are set back, or differ after a failover."""


class MissingSeqReconciler:
    """Finds issued seqs that are lost. `tick` is called every `reconcile_s` seconds."""

    def __init__(self, store: RunStore, delivery: DeliveryState, source: StreamConsumer, event_log: EventLog) -> None:
        self._store, self._delivery, self._source, self._event_log = store, delivery, source, event_log
        self._missing_once: frozenset[int] = frozenset()
        self._ahead_logged = False

    def tick(self) -> list[int]:
        """Make seqs due again that are missing twice in a row, and return them."""
        found = self._store.snapshot()
        if found.ahead_s > AHEAD_S and not self._ahead_logged:
            self._ahead_logged = True
            text = (
                f"ids in {self._store.keys.traj} are {found.ahead_s:.0f} s ahead of Redis' clock, which generates them"
            )
            log.warning("%s: entries were added manually, or the clock was set back; delivery continues", text)
            self._event_log.emit("ids-ahead", text)
        if found.foreign_consumers:
            # Delivered to a learner that lost the lease: it will never acknowledge them.
            self._source.reclaim.set()
        if found.unread or found.foreign_consumers or not self._source.caught_up:
            # Unread entries may belong to any seq. While there are some, training does not starve.
            self._missing_once = frozenset()
            return []
        delivery = self._delivery
        with delivery.lock:
            # only within credit: seqs beyond are not needed yet, whatever count Redis reports
            open_ = delivery.ledger.missing(min(delivery.issued, delivery.credit))
            missing = frozenset(open_) - delivery.pending - delivery.due - found.tasks
            again = sorted(missing & self._missing_once)
            for seq in again:
                delivery.attempts[seq] = delivery.attempts.get(seq, 1) + 1
                delivery.due.add(seq)
        self._missing_once = missing - frozenset(again)
        if again:
            log.warning("reissuing %d lost seqs: %s", len(again), again[:10])
            self._event_log.emit("reissued", f"{len(again)} lost seqs: {again[:10]}")
        return again


class RequeueRequests:
    """Retries given-up seqs on request (`foray dlq requeue`, or SADD on `Keys.requeue`).

    A request stays in Redis until a durable checkpoint records that it was honoured; if its removal failed, a later
    checkpoint removes it. So each request is honoured exactly once, even across a crash. The maintenance thread calls
    `tick` every second while tasks are issued; the rest belongs to the training thread.
    """

    def __init__(self, store: RunStore, delivery: DeliveryState, event_log: EventLog) -> None:
        self._store, self._delivery, self._event_log = store, delivery, event_log
        self._best_effort = BestEffort()

    def tick(self) -> None:
        """Honour valid requests and remove invalid ones. Raises RedisUnavailable."""
        refused: list[bytes] = []
        for raw in self._store.requests():
            seq = number_of(raw)
            try:
                with self._delivery.lock:
                    if seq in self._delivery.requeue_requests:
                        continue  # honoured, but not in a checkpoint yet
                    was = self._delivery.reopen(seq)
                self._event_log.emit("requeued", f"seq {seq} was {was}; requeued")
                log.info("seq %d was %s; requeued on request", seq, was)
            except NotReopenable as error:
                shown = raw[:40].decode("utf-8", "replace")
                self._event_log.emit("requeue-refused", f"{shown}: {error}")
                log.warning("refused the request to requeue %r: %s", shown, error)
                refused.append(raw)
        self._store.drop_requests(refused)

    def committed(self, seqs: Iterable[int]) -> None:
        """Remove the requests for these seqs, which a durable checkpoint contains."""
        done = list(seqs)
        try:
            if not self._best_effort(lambda: self._store.drop_requests(done)):
                return
        except RedisUnavailable as error:
            log.info("could not remove the requests of requeued seqs yet: %s", error)
            return
        with self._delivery.lock:
            self._delivery.requeue_requests.difference_update(done)
