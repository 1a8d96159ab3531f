"""Keys of another type, invalid values, ids that no clock generates, tasks of other programs.

What the learner needs is named with the way out; what only informs people is left out and logged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from learner.config.learner import FilterSettings, LearnerSettings
from learner.data.filter import GroupFilter
from learner.delivery import dead_letters as evidence
from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import DeadLetterStore, EventLog
from learner.delivery.entry import BadEntry
from learner.delivery.lease import LearnerLease
from learner.delivery.reconciler import MissingSeqReconciler
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol import events
from protocol.errors import Fenced, UserError
from protocol.header import seal
from protocol.keys import Keys
from protocol.ledger import Outcome
from protocol.messages import GroupFailed
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.messages import make_group

KEYS = Keys("t1")
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
Serve = Callable[..., int]


def refused(key: str, call: Callable[[], object]) -> None:
    """`call` ends with an error that names the key and the way out."""
    with pytest.raises(UserError) as caught:
        call()
    assert key in caught.value.what and caught.value.why and f"DEL {key}" in caught.value.todo
    assert "\n" not in caught.value.why and len(caught.value.why) < 200


def calls_of(store: RunStore) -> dict[str, list[Callable[[], object]]]:
    """key -> what needs it."""
    return {
        KEYS.lease: [store.holder, lambda: store.renew(1000), lambda: store.acquire("you", 0, 1000, takeover=True)],
        KEYS.epoch: [lambda: store.acquire("me", 0, 60_000, takeover=False)],
        KEYS.issued: [store.issued, lambda: store.issue(0, [(1, b"b")])],
        KEYS.tasks: [store.prepare, store.snapshot, lambda: store.issue(0, [(1, b"b")])],
        KEYS.traj: [store.prepare, store.snapshot, lambda: store.read(1), store.claim, lambda: store.ack([b"1-1"])],
        KEYS.tokens: [store.census, store.rejected, lambda: store.committed("c"), lambda: store.begin_life("l")],
        KEYS.meta: [store.meta, lambda: store.acquire("you", 0, 1000, takeover=True, lineage_id="a")],
        KEYS.target: [store.announced],
        KEYS.engines: [store.engines],
    }


@pytest.mark.parametrize("key", calls_of(RunStore("unix:///none", "t1")))
def test_a_key_of_another_type_is_named_with_the_way_out(store: RunStore, db: redis.Redis, key: str) -> None:
    db.delete(key)
    db.rpush(key, "of another type")
    for call in calls_of(store)[key]:
        refused(key, call)
    db.delete(key)
    store.prepare()
    assert isinstance(store.acquire("me", 0, 60_000, takeover=True), int), "the advice helps"


@pytest.mark.parametrize("garbage", ["abc", "-5", "9" * 16, "1e9", ""])
def test_a_count_that_is_none_is_named_with_the_way_out(store: RunStore, db: redis.Redis, garbage: str) -> None:
    db.set(KEYS.issued, garbage)
    if garbage:
        refused(KEYS.issued, store.issued)
    db.set(KEYS.epoch, garbage or "abc")
    refused(KEYS.epoch, lambda: store.acquire("me", 0, 60_000, takeover=False))


def test_a_lease_without_a_holder_is_free(store: RunStore, db: redis.Redis, tmp_path: Path) -> None:
    db.delete(KEYS.lease)
    db.hset(KEYS.lease, "foo", "bar")
    assert store.holder() is None
    lease = LearnerLease(store, 5.0, tmp_path / "epochs")
    assert lease.acquire(0) == 2
    db.hset(KEYS.lease, mapping={"epoch": "x", "since": "y", "ttl": "z"})
    holder = store.holder()
    assert holder is not None and (holder.epoch, holder.since, holder.renewed_s) == (0, 0.0, None)
    with pytest.raises(Fenced):
        lease.renew()
    assert lease.reacquire() and lease.epoch == 3, "an overwritten lease is reacquired"


def test_a_stream_that_can_take_no_entry_more_is_no_silence(store: RunStore, db: redis.Redis, tmp_path: Path) -> None:
    source = made(store, tmp_path)
    reconciler = MissingSeqReconciler(store, source._delivery, source, EventLog(store))
    reconciler.tick()
    db.xadd(KEYS.traj, {"x": "y"}, id=LAST_ID)
    refused(KEYS.traj, reconciler.tick)
    db.delete(KEYS.traj)
    store.prepare()
    reconciler.tick()


def test_a_learner_whose_stream_takes_nothing_more_ends_with_words_instead_of_waiting(
    run: RunSettings, settings: LearnerSettings, serve: Serve, db: redis.Redis
) -> None:
    db.xadd(KEYS.traj, {"x": "y"}, id=LAST_ID)
    refused(KEYS.traj, lambda: serve(run, settings))
    assert not db.exists(KEYS.lease), "a successor need not wait"


def test_ids_ahead_of_the_clock_are_said_once_and_delivery_goes_on(
    store: RunStore, db: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = made(store, tmp_path)
    reconciler = MissingSeqReconciler(store, source._delivery, source, EventLog(store))
    db.xadd(KEYS.traj, {"x": "y"}, id=f"{2**64 - 1}-0")
    for _ in range(3):
        reconciler.tick()
    assert len([r for r in caplog.records if "ahead of Redis' clock" in r.getMessage()]) == 1
    assert [events.parse(e)["kind"] for _, e in db.xrange(KEYS.events)].count("ids-ahead") == 1
    publish(db, make_group(3, run="t1"))
    source.tick()
    assert [e.seq for e in source.take(1, 0, max_lag=None, timeout_s=0.05)] == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "full"),
    [(key, False) for key in (KEYS.requeue, KEYS.events, KEYS.dlq, KEYS.processes)]
    + [(KEYS.events, True), (KEYS.dlq, True)],
)
def test_what_only_informs_people_never_ends_a_run(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis, caplog: pytest.LogCaptureFixture, key: str, full: bool,
) -> None:  # fmt: skip
    if full:
        db.xadd(key, {"a": "b"}, id=LAST_ID)
    else:
        db.rpush(key, "of another type") if key != KEYS.requeue else db.set(key, "x")

    def spoil(task: Any, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        return (b"\xc1", body) if (task.seq, task.attempt) == (2, 1) else (header, body)

    caplog.set_level(logging.INFO)
    with tiny_learner.Player(address, run.id, spoil=spoil):
        assert serve(run, settings, pace_s=0.15) == 0
    said = [r for r in caplog.records if key in r.getMessage()]
    assert said and len(said) < 5, "once for each that wanted it"


def publish(db: redis.Redis, message: Any) -> bytes:
    header, body = seal(message)
    return db.xadd(KEYS.traj, {"seq": message.seq, "h": header, "b": body})


def made(store: RunStore, tmp_path: Path) -> StreamConsumer:
    parts = {"dead_letters": DeadLetterStore(store, tmp_path / "dead.jsonl"), "event_log": EventLog(store)}
    nothing = GroupFilter(FilterSettings(), 1)
    return StreamConsumer(store, DeliveryState(issued=40), "t1", nothing, capacity=30, **parts)


def unreadable(seq: int) -> GroupFailed:
    """What a rollout server says of a task that it could not decode."""
    return GroupFailed(run="t1", seq=seq, attempt=1, reason="task_corrupt", producer="r1")


def test_a_corrupt_task_is_a_failed_attempt_and_dead_after_three(
    store: RunStore, db: redis.Redis, tmp_path: Path
) -> None:
    source = made(store, tmp_path)
    delivery = source._delivery
    for attempt in (2, 3):
        publish(db, unreadable(5))
        source.tick()
        assert 5 not in delivery.ledger and delivery.due == {5} and delivery.attempts[5] == attempt
        delivery.due.clear()  # it was issued again
    publish(db, unreadable(5))
    source.tick()
    assert delivery.ledger.notes == {5: (Outcome.DEAD, "task_corrupt")}
    assert delivery.counters.dead_letters == 3 and delivery.inconsistency(whole=False) == ""


def test_a_forged_task_does_not_throw_away_the_group_of_the_true_one(
    store: RunStore, db: redis.Redis, tmp_path: Path
) -> None:
    source = made(store, tmp_path)
    delivery = source._delivery
    store.issue(0, [(seq, b"body") for seq in range(1, 7)])
    db.xreadgroup("rollout", "healthy", {KEYS.tasks: ">"}, count=6)
    for _ in range(5):  # junk for a seq that a healthy server has leased
        publish(db, unreadable(5))
    source.tick()
    assert delivery.due == set() and delivery.attempts == {} and 5 not in delivery.ledger
    publish(db, make_group(5, run="t1"))
    source.tick()
    assert [e.seq for e in source.take(1, 0, max_lag=None, timeout_s=0.05)] == [5]
    letters = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert {letter["reason"] for letter in letters} == {"task_corrupt"} and "seq 5" in letters[0]["detail"]


def test_dead_letters_on_disk_are_bounded(store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foray.watch.dead_letters import DeadLetter, purge_file, read_letters

    monkeypatch.setattr(evidence, "FILE_BYTES", 20_000)
    path = tmp_path / "dead_letters.jsonl"
    dead_letters = DeadLetterStore(store, path)
    for n in range(1, 101):
        dead_letters.add(b"%d-0" % n, {b"h": b"h" * 500, b"b": b"b" * 500}, BadEntry("corrupt", "junk", n))
        assert sum(p.stat().st_size for p in tmp_path.glob("dead_letters.jsonl*")) < 2 * 20_000 + 2_000
    assert evidence.rotated(path).exists()
    kept = [letter.seq for letter in read_letters(store._db, "other", tmp_path)]
    assert kept == list(range(kept[0], 101)) and 10 < len(kept) < 40, "the newest, of both files"
    gone = [DeadLetter(f"{n}-0", n, "corrupt", "", "learner", b"", b"") for n in kept[:-1]]
    assert purge_file(tmp_path, gone) == len(kept) - 1
    assert [letter.seq for letter in read_letters(store._db, "other", tmp_path)] == [100]
