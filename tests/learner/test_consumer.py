"""Entries become groups: once each, in order of arrival, whatever the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from learner.config.learner import FilterSettings
from learner.data.filter import GroupFilter
from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import DeadLetterStore, EventLog
from learner.delivery.entry import BadEntry, StreamEntry, read_entry
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from learner.delivery.token_accounting import TokenOutcome
from protocol.header import seal
from protocol.keys import Keys
from protocol.ledger import Outcome
from protocol.messages import GroupFailed
from protocol.versions import PolicyVersion
from tests.support.messages import make_group

KEYS = Keys("t1")
NO_FILTER = GroupFilter(FilterSettings(), 1)


@pytest.fixture
def source(store: RunStore, tmp_path: Path) -> Iterator[StreamConsumer]:
    parts = {"dead_letters": DeadLetterStore(store, tmp_path / "dead.jsonl"), "event_log": EventLog(store)}
    yield StreamConsumer(store, DeliveryState(issued=40), "t1", NO_FILTER, capacity=6, **parts)


def add(db: redis.Redis, seq: int, **kind: object) -> bytes:
    header, body = seal(make_group(seq, run="t1", **kind))
    return db.xadd(KEYS.traj, {"seq": seq, "h": header, "b": body})


def take(source: StreamConsumer, count: int, step: int = 0, max_lag: int | None = None) -> list[int]:
    return [e.seq for e in source.take(count, step, max_lag=max_lag, timeout_s=0.05)]


@pytest.mark.fault(33)
def test_groups_come_in_order_of_arrival_and_only_whole_batches(source: StreamConsumer, db: redis.Redis) -> None:
    for seq in (5, 2, 9):
        add(db, seq)
    source.tick()
    assert take(source, 4) == []
    add(db, 1)
    source.tick()
    assert take(source, 4) == [5, 2, 9, 1]
    assert source._delivery.pending == {5, 2, 9, 1}, "held until they are settled"


def test_no_more_is_read_than_there_is_room_for(source: StreamConsumer, db: redis.Redis) -> None:
    for seq in range(1, 11):
        add(db, seq)
    source.tick()
    source.tick()
    assert len(source) == 6 and db.xpending(KEYS.traj, "learner")["pending"] == 6
    take(source, 4)
    source.tick()
    assert len(source) == 6


def test_pending_entries_of_a_predecessor_come_first(source: StreamConsumer, db: redis.Redis) -> None:
    for seq in range(1, 9):
        add(db, seq)
    db.xreadgroup("learner", "L0", {KEYS.traj: ">"}, count=5)
    for _ in range(3):
        source.tick()
    assert take(source, 6) == [1, 2, 3, 4, 5, 6]
    assert source._delivery.counters.redelivered == 5
    assert {c["name"]: c["pending"] for c in db.xinfo_consumers(KEYS.traj, "learner")}[b"L0"] == 0


def test_entries_of_a_reply_that_never_arrived_are_read_again(
    source: StreamConsumer, db: redis.Redis, store: RunStore
) -> None:
    add(db, 1)
    source.tick()
    add(db, 2)
    store.read(10)  # given to us, and lost on the way
    source.tick()
    assert take(source, 2) == []
    source.reclaim.set()
    source.tick()
    assert take(source, 2) == [1, 2] and source._delivery.counters.duplicates == 0


@pytest.mark.fault(32)
def test_a_duplicate_is_counted_and_acknowledged_with_the_next_checkpoint(
    source: StreamConsumer, db: redis.Redis
) -> None:
    delivery = source._delivery
    first, second = add(db, 1), add(db, 1)
    source.tick()
    assert len(source) == 1 and delivery.counters.duplicates == 1
    delivery.commit_step([1], sampled=16, trained=10)
    assert delivery.mark_durable(delivery.to_state()) == [first, second]
    delivery.mark_acknowledged([first, second])
    third = add(db, 1)  # settled before the last checkpoint
    source.tick()
    assert delivery.counters.duplicates == 2 and delivery.mark_durable(delivery.to_state()) == [third]
    assert delivery.accounting.totals == dict.fromkeys(TokenOutcome, 0) | {
        "trained": 10,
        "masked": 6,
        "duplicate": 32,
    }
    assert delivery.inconsistency() == "" and delivery.accounting.generated == 48


def test_a_failed_group_is_dead_and_takes_no_room(source: StreamConsumer, db: redis.Redis) -> None:
    header, body = seal(GroupFailed(run="t1", seq=4, attempt=3, reason="search", detail="gave up"))
    db.xadd(KEYS.traj, {"seq": 4, "h": header, "b": body})
    source.tick()
    assert len(source) == 0 and source._delivery.ledger.notes == {4: (Outcome.DEAD, "search")}


def test_old_groups_are_dropped_only_if_configured(source: StreamConsumer, db: redis.Redis) -> None:
    for seq, step in ((1, 2), (2, 5), (3, 4)):
        add(db, seq, version=PolicyVersion(1, step))
    source.tick()
    assert take(source, 2, step=6, max_lag=2) == [2, 3]
    assert source._delivery.ledger.notes == {1: (Outcome.STALE, "too_old")}


@pytest.mark.fault(30)
def test_unusable_entries_leave_evidence_and_are_due_again(
    source: StreamConsumer, db: redis.Redis, tmp_path: Path
) -> None:
    header, body = seal(make_group(1, run="t1"))
    other_header, other_body = seal(make_group(2, run="t1"))
    cases: list[tuple[dict[str, bytes | int], int, str]] = [
        ({"seq": 1, "h": header, "b": body[:-3]}, 1, "corrupt"),
        ({"seq": 2, "h": b"", "b": other_body}, 2, "corrupt"),
        ({"seq": 3, "h": header, "b": body}, 3, "invalid_body"),
        ({"seq": 4, "h": header}, 4, "corrupt"),
        ({"seq": "x", "h": header, "b": body}, 0, "invalid_body"),
        ({"nothing": 1}, 0, "corrupt"),
        ({"seq": 99, "h": seal(make_group(99, run="t1"))[0], "b": seal(make_group(99, run="t1"))[1]}, 0, "not_issued"),
        ({"seq": 2, "h": other_header, "b": body}, 2, "corrupt"),
    ]
    for fields, _, _ in cases:
        db.xadd(KEYS.traj, fields)
    source.tick()
    source.tick()
    lines = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert [(line["seq"], line["reason"]) for line in lines] == [(seq, reason) for _, seq, reason in cases]
    assert db.xlen(KEYS.dlq) == 8 and source._delivery.due == {1, 2, 3, 4} and len(source) == 0
    delivery = source._delivery
    assert len(delivery.mark_durable(delivery.to_state())) == 8, (
        "acknowledged with the next checkpoint, those without a seq too"
    )
    add(db, 1)
    source.tick()
    assert source._delivery.due == {2, 3, 4}, "a good group has come meanwhile"


def test_an_unusable_entry_cannot_add_a_seq_that_was_never_issued(
    source: StreamConsumer, db: redis.Redis, tmp_path: Path
) -> None:
    header, body = seal(make_group(10**6, run="somebody-else"))
    for _ in range(3):
        db.xadd(KEYS.traj, {"seq": 10**6, "h": header, "b": body})
        source.tick()
    delivery = source._delivery
    assert (
        delivery.counters.dead_letters == 3
        and not delivery.due
        and delivery.ledger.settled == 0
        and delivery.attempts == {}
    )
    assert "never issued" in (tmp_path / "dead.jsonl").read_text()


def test_a_counter_in_redis_does_not_admit_a_seq_beyond_the_issue_limit(
    source: StreamConsumer, db: redis.Redis
) -> None:
    source._delivery.credit = 44
    db.set(KEYS.issued, 5_000_000)
    for seq in (44, 45, 4_000_000):
        add(db, seq)
    source.tick()
    assert source._delivery.pending == {44}, "the reply to its issue may have been lost"
    assert source._delivery.counters.dead_letters == 2 and not source._delivery.due


@pytest.mark.fault(30)
@hypothesis_settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_no_bytes_whatever_make_reading_fail_otherwise(data: st.DataObject) -> None:
    header, body = seal(make_group(1, run="t1"))
    fields = {b"seq": b"1", b"h": header, b"b": body}
    name = data.draw(st.sampled_from(sorted(fields)))
    raw = bytearray(fields[name])
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    fields[name] = bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        entry = read_entry(b"1-1", fields, "t1")
    except BadEntry as bad:
        assert bad.seq in (0, 1) or fields[b"seq"].isdigit()
    else:
        assert isinstance(entry, StreamEntry) and entry.seq == 1 and fields[b"b"] == body
