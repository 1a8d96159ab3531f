"""A given-up seq can be retried on request: once, across any crash, and the run still ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from learner.delivery.dead_letters import EventLog
from learner.delivery.reconciler import RequeueRequests
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol import events
from protocol.keys import Keys
from protocol.ledger import Outcome
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.waiting import wait_until

KEYS = Keys("t1")
Serve = Callable[..., int]


def reported(db: redis.Redis, kind: str) -> list[str]:
    lines = [events.parse(fields) for _, fields in db.xrange(KEYS.events)]
    return [line["text"] for line in lines if line["kind"] == kind]


def facts(run: RunSettings) -> dict[str, Any]:
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found is not None
    return found.facts


def test_dead_and_stale_seqs_are_opened_and_all_other_requests_are_refused_with_a_reason(
    store: RunStore, db: redis.Redis
) -> None:
    delivery = DeliveryState(issued=6)
    delivery.settle([1], Outcome.DEAD, "corrupt")
    delivery.settle([2], Outcome.STALE, "too_old")
    delivery.settle([3], Outcome.FILTERED, "no_variance")
    delivery.commit_step([4], sampled=0, trained=0)
    requests = RequeueRequests(store, delivery, EventLog(store))
    db.sadd(KEYS.requeue, 1, 2, 3, 4, 5, 99, "x", b"\xff", "-1", "9" * 30)
    requests.tick()
    assert delivery.due == delivery.requeue_requests == {1, 2} and db.smembers(KEYS.requeue) == {b"1", b"2"}
    assert set(reported(db, "requeued")) == {
        "seq 1 was dead (corrupt); requeued",
        "seq 2 was stale (too_old); requeued",
    }
    refused = " / ".join(sorted(reported(db, "requeue-refused")))
    assert all(f"seq {seq} is trained or filtered" in refused for seq in (3, 4)) and "seq 5 is not settled" in refused
    assert len(reported(db, "requeue-refused")) == 8
    requests.tick()
    assert delivery.counters.requeued == 2, "what is honoured is not honoured again before the checkpoint"
    requests.committed(delivery.to_state()["requests"])
    assert db.smembers(KEYS.requeue) == delivery.requeue_requests == set()


def test_a_request_survives_until_redis_has_taken_note(
    store: RunStore, db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = DeliveryState(issued=2)
    delivery.settle([1], Outcome.DEAD, "corrupt")
    requests = RequeueRequests(store, delivery, EventLog(store))
    db.sadd(KEYS.requeue, 1)
    requests.tick()
    state = delivery.to_state()

    def away(seqs: Any) -> None:
        raise RedisUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(store, "drop_requests", away)
        requests.committed(state["requests"])
    delivery.settle([1], Outcome.DEAD, "corrupt")  # it failed again
    requests.tick()
    assert delivery.due == set() and 1 in delivery.ledger, "one request, one more try"
    again = DeliveryState(issued=2)
    again.restore(state)
    assert again.requeue_requests == {1}, "the successor knows that it is dealt with"


def test_a_dead_seq_is_trained_after_all_and_the_accounting_is_consistent(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    run = run.model_copy(update={"steps": 10})
    with tiny_learner.Player(address, run.id, fails={5, 6}) as player:

        def ask(updates: int) -> None:
            if updates == 4:
                player.fails.discard(5)
                db.sadd(KEYS.requeue, 5, 2)
                wait_until(lambda: reported(db, "requeued") and reported(db, "requeue-refused"), "both are answered")

        assert serve(run, settings, before=ask) == 0
    made = facts(run)
    assert 5 in [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]
    assert made["ledger"]["notes"] == [[6, "dead", "engine"]]
    assert made["ledger"]["reopened"] == [] and db.smembers(KEYS.requeue) == set()
    assert [attempt for seq, attempt in player.seen if seq == 5] == [1, 1], "with all its attempts before it"
    tokens = made["tokens"]
    assert tokens["generated"] == sum(tokens["buckets"].values()) and tokens["buckets"]["failed"] == 14
    assert made["redis"]["lost"] == 0


def test_a_crash_before_the_checkpoint_honours_the_request_again_and_once(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    run = run.model_copy(update={"steps": 12})
    with tiny_learner.Player(address, run.id, fails={5}) as player:

        def ask(updates: int) -> None:
            if updates == 4:
                player.fails.discard(5)
                db.sadd(KEYS.requeue, 5)
                wait_until(lambda: reported(db, "requeued"), "it is requeued")
                raise tiny_learner.Crash  # the last checkpoint is of step 3, and knows seq 5 as dead

        with pytest.raises(tiny_learner.Crash):
            serve(run, settings, before=ask)
        assert [seq for seq, _, _ in facts(run)["ledger"]["notes"]] == [5] and db.smembers(KEYS.requeue) == {b"5"}
        assert serve(run, settings) == 0
    trained = [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]
    assert trained.count(5) == 1 and len(trained) == len(set(trained)) == 48
    assert facts(run)["tally"]["requeued"] == 1 and db.smembers(KEYS.requeue) == set()


@pytest.mark.fault(50)
def test_a_seq_that_is_opened_at_the_very_end_does_not_hold_up_the_run(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    with tiny_learner.Player(address, run.id, fails={5}) as player:

        def ask(updates: int) -> None:
            if updates == 7:
                player.paused.set()
                db.sadd(KEYS.requeue, 5)
                wait_until(lambda: reported(db, "requeued"), "it is requeued")

        assert serve(run, settings, before=ask) == 0
    made = facts(run)
    assert made["step"] == run.steps and made["ledger"]["notes"] == [] and made["ledger"]["filtered"]["excess"] >= 1
    assert made["tally"]["excess"] >= 1 and made["ledger"]["reopened"] == []
    in_flight = {fields[b"seq"] for _, fields in db.xrange(KEYS.tasks)}
    assert b"5" in in_flight, "its task existed, and the run did not wait for it"
    assert db.hget(KEYS.target, "state") == b"done" and reported(db, "done")


@pytest.mark.fault(29)
def test_an_opened_seq_is_issued_again_when_redis_has_lost_everything(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    run = run.model_copy(update={"steps": 14})
    with tiny_learner.Player(address, run.id, fails={5}) as player:

        def ask(updates: int) -> None:
            if updates == 5:
                player.fails.discard(5)
                player.paused.set()
                assert player.resting.wait(10)
                db.sadd(KEYS.requeue, 5)
                wait_until(lambda: reported(db, "requeued"), "it is requeued")
                db.flushall()
                player.paused.clear()

        assert serve(run, settings, before=ask) == 0
    trained = [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]
    assert trained.count(5) == 1
