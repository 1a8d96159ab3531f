"""The Redis audit: the difference is zero as long as Redis loses nothing, and reported otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import redis

from learner.config.learner import FilterSettings
from learner.data.filter import GroupFilter
from learner.delivery.audit import RedisAudit
from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import DeadLetterStore, EventLog
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol import events
from protocol import functions as fn
from protocol.header import seal
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.ledger import Outcome
from tests.support.messages import make_group

KEYS = Keys("t1")
TOKENS = 16
"""Of every group here."""


class Learner:
    """Delivery state, consumer and audit of one learner start."""

    def __init__(self, store: RunStore, folder: Path, checkpoint: dict[str, Any] | None = None, name: str = "") -> None:
        self.store, self.delivery, event_log = store, DeliveryState(issued=40), EventLog(store)
        if checkpoint is not None:
            self.delivery.restore(checkpoint)
            self.delivery.issued = 40
            ids = list(self.delivery.unacked)
            store.ack(ids)
            self.delivery.mark_acknowledged(ids)
        known = (checkpoint or {}).get("redis")
        self.cross = RedisAudit(store, self.delivery, event_log, state=known, checkpoint=name)
        dead_letters = DeadLetterStore(store, folder / "dead.jsonl")
        nothing = GroupFilter(FilterSettings(), 1)
        self.source = StreamConsumer(
            store,
            self.delivery,
            "t1",
            nothing,
            capacity=9,
            dead_letters=dead_letters,
            event_log=event_log,
        )

    def checkpoint(self, name: str, *, acknowledge: bool = True) -> dict[str, Any]:
        state = self.delivery.to_state() | {"redis": self.cross.to_state()}
        ids = self.delivery.mark_durable(state)
        if acknowledge:
            self.store.ack(ids)
            self.delivery.mark_acknowledged(ids)
            self.cross.committed(name)
        return state

    def train(self, *seqs: int) -> None:
        entries = self.source.take(len(seqs), 0, max_lag=None, timeout_s=1)
        assert [e.seq for e in entries] == list(seqs)
        self.delivery.commit_step(seqs, sampled=TOKENS * len(seqs), trained=9 * len(seqs))


@pytest.fixture
def learner(store: RunStore, tmp_path: Path) -> Learner:
    made = Learner(store, tmp_path)
    assert made.cross.compare() == ""
    return made


def publish(db: redis.Redis, *seqs: int) -> None:
    """As rollout servers do."""
    for seq in seqs:
        id_ = db.xadd(KEYS.tasks, {"seq": seq, "b": b"task"})
        db.xreadgroup(TASK_GROUP, "r1", {KEYS.tasks: ">"}, count=1)
        header, body = seal(make_group(seq, run="t1"))
        assert db.fcall(fn.PUBLISH, 3, KEYS.tasks, KEYS.traj, KEYS.tokens, id_, seq, header, body, TOKENS) != b"DUP"


def reported(db: redis.Redis, kind: str) -> list[str]:
    lines = [events.parse(fields) for _, fields in db.xrange(KEYS.events)]
    return [line["text"] for line in lines if line["kind"] == kind]


def test_published_is_received_or_waits_at_every_moment(learner: Learner, db: redis.Redis, store: RunStore) -> None:
    publish(db, 1, 2, 3)
    assert learner.cross.compare() == "", "no learner has received them"
    learner.source.tick()
    learner.train(1, 2)
    publish(db, 4)
    assert learner.cross.compare() == ""
    store.read(9)  # given to us, and the reply was lost
    assert learner.cross.compare() == ""
    learner.checkpoint("step_1.e1")
    assert learner.cross.compare() == "" and learner.delivery.inconsistency() == ""
    assert (learner.delivery.accounting.received_counted, learner.cross.values()["token_accounting_redis_lost"]) == (
        3 * TOKENS,
        0,
    )


@pytest.mark.parametrize("scale", [1, 4])
def test_no_call_of_a_census_returns_more_than_a_page(
    learner: Learner, db: redis.Redis, store: RunStore, monkeypatch: pytest.MonkeyPatch, scale: int
) -> None:
    seen: list[int] = []

    def counted(call: Any) -> Any:
        def counting(*args: Any) -> Any:
            reply = call(*args)
            seen.append(sum(len(part) if isinstance(part, list) else 1 for part in reply))
            return reply

        return counting

    waiting, pending = 8 * scale, 1500 * scale
    with db.pipeline() as pipe:
        for _ in range(pending):
            pipe.xadd(KEYS.traj, {"t": 1})
        for _ in range(waiting):
            pipe.xadd(KEYS.traj, {"b": b"x" * (300 << 10), "t": TOKENS})
        pipe.execute()
    db.xreadgroup(TRAJ_GROUP, "dead", {KEYS.traj: ">"}, count=pending)
    for name in ("fcall", "xpending_range"):
        monkeypatch.setattr(store._db, name, counted(getattr(store._db, name)))
    census = store.census()
    assert len(census.pending) == pending and list(census.unread.values()) == [TOKENS] * waiting
    assert store.tokens_of(census.pending) == pending
    assert max(seen) <= 1000 * 2, "ids of a page, or of at most 1 MiB of entries with their tokens"
    bodies = [n for n in seen if n <= 8]
    assert len(bodies) > waiting / 4, "four bodies a call"


def test_an_entry_that_vanished_from_redis_is_found_missing(learner: Learner, db: redis.Redis) -> None:
    publish(db, 1, 2)
    db.xdel(KEYS.traj, db.xrange(KEYS.traj)[0][0])
    assert learner.cross.compare() == "16 published tokens were received by no learner"
    learner.delivery.accounting.received_counted += 3  # and an entry counted twice
    assert learner.cross.compare() == "13 published tokens were received by no learner"


def test_a_learner_that_crashed_anywhere_around_a_checkpoint_counts_every_entry_once(
    learner: Learner, db: redis.Redis, store: RunStore, tmp_path: Path
) -> None:
    publish(db, 1, 2, 3, 4)
    learner.source.tick()
    learner.train(1, 2)
    state = learner.checkpoint("step_1.e1", acknowledge=False)  # killed before it could acknowledge
    learner.train(3, 4)  # lost with it
    again = Learner(store, tmp_path, state, "step_1.e1")
    assert again.cross.compare() == "" and again.delivery.accounting.received_counted == 2 * TOKENS
    again.source.tick()
    again.train(3, 4)
    assert again.delivery.counters.duplicates == 0 and again.delivery.accounting.generated == 4 * TOKENS
    assert again.cross.compare() == "" == again.delivery.inconsistency()
    state = again.checkpoint("step_2.e2")
    third = Learner(store, tmp_path, state, "step_2.e2")
    third.delivery.accounting.received_counted -= 5  # a mistake in the arithmetic of resuming would not go unnoticed
    assert third.cross.compare() == "5 published tokens were received by no learner"


@pytest.mark.fault(29)
def test_a_wiped_redis_is_reported(
    learner: Learner, db: redis.Redis, store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
    publish(db, 1, 2)
    learner.source.tick()
    publish(db, 3)  # no learner receives it
    db.flushall()
    store.prepare()
    with caplog.at_level(logging.WARNING):
        assert learner.cross.compare() == ""
    assert learner.cross.values()["token_accounting_redis_lost"] == -2 * TOKENS, "received, and Redis has forgotten it"
    assert "32 received tokens are not counted" in caplog.text
    assert len(reported(db, "redis-lost")) == 1
    publish(db, 3)
    assert learner.cross.compare() == "", "and from there on every token is accounted for again"
    db.xdel(KEYS.traj, db.xrange(KEYS.traj)[0][0])
    assert learner.cross.compare() == "16 published tokens were received by no learner"


def test_an_entry_whose_delivery_redis_forgot_is_not_delivered_again(
    learner: Learner, db: redis.Redis, store: RunStore
) -> None:
    publish(db, 1, 2, 3)
    learner.source.tick()
    db.xgroup_destroy(KEYS.traj, TRAJ_GROUP)  # as after a restart without the newest second
    db.xgroup_create(KEYS.traj, TRAJ_GROUP, id="0")
    assert learner.cross.compare() == "" and store.snapshot().unread
    learner.train(1, 2)
    learner.checkpoint("step_1.e1")
    assert learner.cross.compare() == "" and db.xlen(KEYS.traj) == 1 and store.snapshot().unread
    learner.source.tick()
    learner.train(3)
    learner.checkpoint("step_2.e1")
    assert learner.cross.compare() == "" and not store.snapshot().unread
    assert learner.delivery.counters.duplicates == 0 and learner.cross.values()["token_accounting_redis_lost"] == 0


def test_deleted_entries_are_not_unread(learner: Learner, db: redis.Redis, store: RunStore) -> None:
    publish(db, 1, 2)
    store.read(1)  # the first is held
    assert store.snapshot().unread
    store.ack([db.xrange(KEYS.traj)[1][0]])
    assert db.xlen(KEYS.traj) == 1 and not store.snapshot().unread


def test_a_group_that_redis_lost_while_it_was_held_is_no_fault_of_the_successor(
    learner: Learner, db: redis.Redis, store: RunStore, tmp_path: Path
) -> None:
    publish(db, 1, 2)
    learner.source.tick()
    learner.train(1)
    db.flushall()
    store.prepare()
    assert store.acquire("me", 0, 60_000, takeover=True) == 1
    assert learner.cross.compare() == "" and "32 received tokens" in reported(db, "redis-lost")[0]
    state = learner.checkpoint("step_1.e1")  # seq 2 is held, and undecided; then the learner ends
    successor = Learner(store, tmp_path, state, "step_1.e1")
    assert successor.cross.compare() == "", "what it will never receive is not missing"
    assert successor.cross.values()["token_accounting_redis_lost"] == -TOKENS


def test_resuming_from_an_older_checkpoint_counts_what_the_newer_one_had(
    learner: Learner, db: redis.Redis, store: RunStore, tmp_path: Path
) -> None:
    publish(db, 1, 2)
    learner.source.tick()
    older = learner.checkpoint("step_0.e1")
    learner.train(1, 2)
    learner.checkpoint("step_1.e1")
    again = Learner(store, tmp_path, older, "step_0.e1")
    assert again.cross.compare() == ""
    assert again.cross.values()["token_accounting_redis_lost"] == 2 * TOKENS


def test_a_checkpoint_without_an_audit_starts_one(
    learner: Learner, db: redis.Redis, store: RunStore, tmp_path: Path
) -> None:
    publish(db, 1, 2)
    learner.source.tick()
    learner.train(1, 2)
    state = learner.checkpoint("step_1.e1")
    for name in ("tokens", "redis"):
        del state[name]
    again = Learner(store, tmp_path, state, "step_1.e1")
    assert again.cross.compare() == "" and again.cross.values()["token_accounting_redis_lost"] == 0
    publish(db, 3)
    again.source.tick()
    assert again.cross.compare() == "" and again.delivery.accounting.generated == TOKENS


def test_rejected_attempts_are_counted_on_across_a_redis_that_forgot(
    learner: Learner, db: redis.Redis, store: RunStore
) -> None:
    def reject(tokens: int) -> None:
        id_ = db.xadd(KEYS.tasks, {"seq": 9, "b": b"task"})
        db.xreadgroup(TASK_GROUP, "r1", {KEYS.tasks: ">"}, count=9)
        assert db.fcall(fn.RETRY, 2, KEYS.tasks, KEYS.tokens, id_, 9, b"next", tokens) != b"DUP"

    reject(30)
    learner.cross.update()
    assert learner.cross.values()["token_accounting_rejected"] == 30
    db.flushall()
    store.prepare()
    reject(5)
    learner.cross.update()  # it cannot know yet whose count this is
    learner.cross.compare()
    reject(2)
    learner.cross.update()
    assert learner.cross.values()["token_accounting_rejected"] == 37


def test_tokens_of_dead_and_unreadable_groups_are_counted(learner: Learner, db: redis.Redis) -> None:
    id_ = db.xadd(KEYS.tasks, {"seq": 1, "b": b"task"})
    db.xreadgroup(TASK_GROUP, "r1", {KEYS.tasks: ">"}, count=1)
    db.fcall(fn.PUBLISH, 3, KEYS.tasks, KEYS.traj, KEYS.tokens, id_, 1, b"\xc1", b"?", 21)
    publish(db, 2)
    learner.source.tick()
    learner.delivery.settle([2], Outcome.STALE, "too_old", tokens=TOKENS)
    buckets = learner.delivery.accounting.totals
    assert (buckets["failed"], buckets["stale"], learner.delivery.accounting.generated) == (21, TOKENS, 21 + TOKENS)
    assert learner.delivery.inconsistency() == "" == learner.cross.compare()
