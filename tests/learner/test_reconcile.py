"""What is issued and found nowhere is issued again; what is somewhere is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from learner.config.learner import FilterSettings
from learner.data.filter import GroupFilter
from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import DeadLetterStore, EventLog
from learner.delivery.reconciler import MissingSeqReconciler
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol.errors import StateLost
from protocol.header import seal
from protocol.keys import Keys
from protocol.ledger import Outcome
from tests.support.messages import make_group

KEYS = Keys("t1")


@pytest.fixture
def delivery() -> DeliveryState:
    return DeliveryState(issued=6, credit=6)


@pytest.fixture
def source(store: RunStore, delivery: DeliveryState, tmp_path: Path) -> StreamConsumer:
    parts = {"dead_letters": DeadLetterStore(store, tmp_path / "dead.jsonl"), "event_log": EventLog(store)}
    return StreamConsumer(store, delivery, "t1", GroupFilter(FilterSettings(), 1), capacity=8, **parts)


@pytest.fixture
def reconciler(store: RunStore, delivery: DeliveryState, source: StreamConsumer) -> MissingSeqReconciler:
    """Seqs 1 to 6 are issued: 1 settled, 2 here, 3 undelivered, 4 leased, 5 unread, 6 lost."""
    delivery.settle([1], Outcome.DEAD, "x")
    store.issue(0, [(4, b"t"), (5, b"t"), (6, b"t")])
    return MissingSeqReconciler(store, delivery, source, EventLog(store))


def publish(db: redis.Redis, seq: int) -> None:
    header, body = seal(make_group(seq, run="t1"))
    db.xadd(KEYS.traj, {"seq": seq, "h": header, "b": body})


def arrange(db: redis.Redis, store: RunStore, source: StreamConsumer) -> None:
    db.delete(KEYS.tasks)
    store.prepare()
    store.reissue([(4, b"t"), (9, b"t")])
    ((_, leased),) = db.xreadgroup("rollout", "r1", {KEYS.tasks: ">"}, count=2)
    db.xack(KEYS.tasks, "rollout", leased[1][0])  # published, still in the stream behind the floor
    store.reissue([(3, b"t")])
    publish(db, 2)
    source.tick()


def test_only_a_seq_found_nowhere_twice_in_a_row_is_issued_again(
    reconciler: MissingSeqReconciler, db: redis.Redis, store: RunStore, source: StreamConsumer, delivery: DeliveryState
) -> None:
    arrange(db, store, source)
    assert reconciler.tick() == []
    publish(db, 5)
    source.tick()
    assert reconciler.tick() == [6]
    assert delivery.due == {6} and delivery.attempts[6] == 2
    assert reconciler.tick() == [], "due already"


def test_what_lies_beyond_the_credit_is_not_due_however_much_is_said_to_be_issued(
    reconciler: MissingSeqReconciler, db: redis.Redis, store: RunStore, source: StreamConsumer, delivery: DeliveryState
) -> None:
    arrange(db, store, source)
    delivery.issued = 10**9
    assert [reconciler.tick(), reconciler.tick()] == [[], [5, 6]]
    assert delivery.inconsistency() == "" and delivery.ledger.open(delivery.issued) == 10**9 - 1


@pytest.mark.fault(30)
def test_a_task_that_is_none_is_no_reason_to_stop(
    reconciler: MissingSeqReconciler, db: redis.Redis, store: RunStore, source: StreamConsumer
) -> None:
    """Found by `make chaos SEED=1`: it ended the maintenance thread, and with it the learner."""
    arrange(db, store, source)
    for fields in ({b"junk": b"\xff"}, {b"seq": b"nine"}, {b"seq": b"9" * 5000}):
        db.xadd(KEYS.tasks, fields)
    assert reconciler.tick() == []


def test_unread_entries_may_be_any_seq(
    reconciler: MissingSeqReconciler, db: redis.Redis, store: RunStore, source: StreamConsumer, delivery: DeliveryState
) -> None:
    arrange(db, store, source)
    publish(db, 5)
    publish(db, 6)
    assert reconciler.tick() == reconciler.tick() == reconciler.tick() == []
    source.tick()
    assert reconciler.tick() == reconciler.tick() == [] and delivery.pending == {2, 5, 6}


def test_an_entry_given_to_a_fenced_learner_is_taken_over(
    reconciler: MissingSeqReconciler, db: redis.Redis, store: RunStore, source: StreamConsumer, delivery: DeliveryState
) -> None:
    arrange(db, store, source)
    publish(db, 5)
    publish(db, 6)
    db.xreadgroup("learner", "L0", {KEYS.traj: ">"}, count=9)
    assert reconciler.tick() == []
    source.tick()
    assert delivery.pending == {2, 5, 6}
    assert reconciler.tick() == reconciler.tick() == []


def test_missing_streams_are_reported(reconciler: MissingSeqReconciler, db: redis.Redis) -> None:
    db.delete(KEYS.traj)
    with pytest.raises(StateLost):
        reconciler.tick()
