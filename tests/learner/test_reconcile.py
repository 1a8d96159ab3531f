"""What is issued and found nowhere is issued again; what is somewhere is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from learner.config.learner import FilterSettings
from learner.data.filter import GroupFilter
from learner.delivery.consumer import Source
from learner.delivery.dead_letters import Evidence, History
from learner.delivery.reconciler import Reconciler
from learner.delivery.state import Books
from learner.delivery.store import RunStore
from protocol.errors import StateLost
from protocol.header import seal
from protocol.keys import Keys
from protocol.ledger import Outcome
from tests.support.messages import make_group

KEYS = Keys("t1")


@pytest.fixture
def books() -> Books:
    return Books(issued=6, credit=6)


@pytest.fixture
def source(store: RunStore, books: Books, tmp_path: Path) -> Source:
    parts = {"evidence": Evidence(store, tmp_path / "dead.jsonl"), "history": History(store)}
    return Source(store, books, "t1", GroupFilter(FilterSettings(), 1), room=8, max_attempts=3, **parts)


@pytest.fixture
def reconciler(store: RunStore, books: Books, source: Source) -> Reconciler:
    """Seqs 1 to 6 are issued: 1 settled, 2 here, 3 undelivered, 4 leased, 5 read by nobody, 6 lost."""
    books.settle([1], Outcome.DEAD, "x")
    store.issue(0, [(4, b"t"), (5, b"t"), (6, b"t")])
    return Reconciler(store, books, source, History(store))


def publish(db: redis.Redis, seq: int) -> None:
    header, body = seal(make_group(seq, run="t1"))
    db.xadd(KEYS.traj, {"seq": seq, "h": header, "b": body})


def arrange(db: redis.Redis, store: RunStore, source: Source) -> None:
    db.delete(KEYS.tasks)
    store.prepare()
    store.reissue([(4, b"t"), (9, b"t")])
    ((_, leased),) = db.xreadgroup("rollout", "r1", {KEYS.tasks: ">"}, count=2)
    db.xack(KEYS.tasks, "rollout", leased[1][0])  # published, still in the stream behind the floor
    store.reissue([(3, b"t")])
    publish(db, 2)
    source.turn()


def test_only_a_seq_found_nowhere_twice_in_a_row_is_issued_again(
    reconciler: Reconciler, db: redis.Redis, store: RunStore, source: Source, books: Books
) -> None:
    arrange(db, store, source)
    assert reconciler.turn() == []
    publish(db, 5)
    source.turn()
    assert reconciler.turn() == [6]
    assert books.due == {6} and books.attempts[6] == 2
    assert reconciler.turn() == [], "due already"


def test_what_lies_beyond_the_credit_is_not_due_however_much_is_said_to_be_issued(
    reconciler: Reconciler, db: redis.Redis, store: RunStore, source: Source, books: Books
) -> None:
    arrange(db, store, source)
    books.issued = 10**9
    assert [reconciler.turn(), reconciler.turn()] == [[], [5, 6]]
    assert books.check() == "" and books.ledger.open(books.issued) == 10**9 - 1


@pytest.mark.fault(30)
def test_a_task_that_is_none_is_no_reason_to_stop(
    reconciler: Reconciler, db: redis.Redis, store: RunStore, source: Source
) -> None:
    """Found by `make chaos SEED=1`: it ended the keeper, and with it the learner."""
    arrange(db, store, source)
    for fields in ({b"junk": b"\xff"}, {b"seq": b"nine"}, {b"seq": b"9" * 5000}):
        db.xadd(KEYS.tasks, fields)
    assert reconciler.turn() == []


def test_entries_nobody_has_looked_at_may_be_any_seq(
    reconciler: Reconciler, db: redis.Redis, store: RunStore, source: Source, books: Books
) -> None:
    arrange(db, store, source)
    publish(db, 5)
    publish(db, 6)
    assert reconciler.turn() == reconciler.turn() == reconciler.turn() == []
    source.turn()
    assert reconciler.turn() == reconciler.turn() == [] and books.held == {2, 5, 6}


def test_an_entry_given_to_a_fenced_learner_is_taken_over(
    reconciler: Reconciler, db: redis.Redis, store: RunStore, source: Source, books: Books
) -> None:
    arrange(db, store, source)
    publish(db, 5)
    publish(db, 6)
    db.xreadgroup("learner", "L0", {KEYS.traj: ">"}, count=9)
    assert reconciler.turn() == []
    source.turn()
    assert books.held == {2, 5, 6}
    assert reconciler.turn() == reconciler.turn() == []


def test_missing_streams_are_told(reconciler: Reconciler, db: redis.Redis) -> None:
    db.delete(KEYS.traj)
    with pytest.raises(StateLost):
        reconciler.turn()
