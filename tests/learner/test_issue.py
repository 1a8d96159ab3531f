"""Tasks: how many, which, and again after Redis has lost them."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from learner.data.questions import QuestionSet, fingerprint
from learner.data.sampler import Sampler
from learner.delivery import issue_limit
from learner.delivery.dead_letters import EventLog
from learner.delivery.issue_limit import IssueReservation
from learner.delivery.issuer import TaskIssuer
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol.codec import decode_as
from protocol.errors import Fenced, StateLost
from protocol.keys import Keys
from protocol.ledger import Outcome
from protocol.messages import Sampling, Task
from protocol.settings import RunSettings
from tests.support.messages import make_question


@pytest.fixture
def sampler() -> Sampler:
    questions = tuple(make_question(i) for i in range(5))
    return Sampler(QuestionSet(questions, fingerprint(questions)), seed=1)


@pytest.fixture
def issuer(store: RunStore, run: RunSettings, sampler: Sampler) -> TaskIssuer:
    epochs = run.checkpoint_dir / "epochs"
    epochs.mkdir(parents=True)
    warm = run.model_copy(update={"temperature": 0.7, "top_p": 0.95, "top_k": 50})
    made = TaskIssuer(store, DeliveryState(), sampler, warm, IssueReservation(epochs), EventLog(store))
    made.enabled.set()
    return made


def tasks(db: redis.Redis) -> list[Task]:
    return [decode_as(Task, fields[b"b"]) for _, fields in db.xrange(Keys("t1").tasks)]


def test_tasks_carry_the_question_and_how_to_sample(issuer: TaskIssuer, db: redis.Redis, sampler: Sampler) -> None:
    assert issuer.tick() == 12
    made = tasks(db)
    assert [t.seq for t in made] == list(range(1, 13))
    assert all(t.question == sampler.question(t.seq) for t in made)
    assert {(t.group_size, t.attempt) for t in made} == {(4, 1)}
    assert all(t.sampling == Sampling(temperature=0.7, top_p=0.95, top_k=50) for t in made)


@pytest.mark.fault(48)
def test_nothing_is_issued_without_credit_or_with_the_valve_closed(issuer: TaskIssuer, db: redis.Redis) -> None:
    issuer.tick()
    assert issuer.tick() == 0
    issuer._delivery.commit_step([1, 2, 3, 4], sampled=0, trained=0)
    issuer.enabled.clear()
    assert issuer.tick() == 0
    issuer.enabled.set()
    assert issuer.tick() == 4 and issuer._delivery.issued == 16


def test_a_reply_that_was_lost_does_not_issue_twice(issuer: TaskIssuer, db: redis.Redis) -> None:
    issuer.tick()
    issuer._delivery.issued = 0  # as if the reply had never come
    issuer.tick()
    assert len(tasks(db)) == 12 and issuer._delivery.issued == 12


def test_after_a_wipe_everything_unsettled_is_issued_again_but_for_what_is_here(
    issuer: TaskIssuer, db: redis.Redis, store: RunStore
) -> None:
    issuer.tick()
    delivery = issuer._delivery
    delivery.settle([1, 2, 5], Outcome.DEAD, "x")
    delivery.pending |= {4, 7}
    db.flushall()
    with pytest.raises(Fenced):
        issuer.tick()
    store.acquire("me", 1, 60_000, takeover=False)
    store.set_owner(2, "me")
    with pytest.raises(StateLost):
        issuer.tick()
    store.prepare()
    issuer.recount()
    issuer.tick()
    assert [t.seq for t in tasks(db)] == [3, 6, 8, 9, 10, 11, 12, 13, 14, 15]
    assert (delivery.issued, store.issued()) == (15, 15)


def test_what_is_due_is_issued_with_its_attempt(issuer: TaskIssuer, db: redis.Redis) -> None:
    issuer.tick()
    issuer._delivery.record_failed_attempt(3, 1, 3, "corrupt")
    assert issuer.tick() == 1
    assert [(t.seq, t.attempt) for t in tasks(db)][-1] == (3, 2)
    assert (issuer._delivery.due, issuer._delivery.counters.reissued) == (set(), 1)


def test_a_learner_that_lost_the_lease_cannot_issue(issuer: TaskIssuer, store: RunStore) -> None:
    store.acquire("rival", 1, 60_000, takeover=True)
    with pytest.raises(Fenced):
        issuer.tick()


def test_tasks_wait_until_the_reservation_is_on_disk(
    issuer: TaskIssuer,
    db: redis.Redis,
    run: RunSettings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start would otherwise find more issued in Redis than its directory knows of, and refuse it."""
    monkeypatch.setattr(issue_limit, "AHEAD", 0)
    epochs, away = run.checkpoint_dir / "epochs", run.checkpoint_dir / "away"
    epochs.rename(away)
    for _ in range(3):
        assert issuer.tick() == 0 and not tasks(db)
    assert caplog.text.count("issuing tasks is paused until the disk can be written") == 1
    away.rename(epochs)
    assert issuer.tick() == 12
    assert IssueReservation(epochs).highest() == 12
    epochs.rename(away)
    issuer._delivery.commit_step([1, 2, 3, 4], sampled=0, trained=0)
    assert issuer.tick() == 0 and len(tasks(db)) == 12
    assert caplog.text.count("issuing tasks is paused") == 2, "once for each time"


def test_reservations_are_written_rarely(tmp_path: Path) -> None:
    reserved = IssueReservation(tmp_path)
    reserved.reserve(5, 1)
    assert IssueReservation(tmp_path).highest() == 5 + issue_limit.AHEAD
    (tmp_path / "e1.issued").unlink()
    reserved.reserve(5 + issue_limit.AHEAD, 1)
    assert not list(tmp_path.iterdir()), "it was reserved"
    reserved.reserve(6 + issue_limit.AHEAD, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["e2.issued"]


def test_an_impossible_count_in_redis_is_ignored(issuer: TaskIssuer, db: redis.Redis) -> None:
    """`SET issued 5000000` made a list of five million seqs, and as many tasks."""
    db.set(Keys("t1").issued, 5_000_000)
    issuer.recount()
    assert issuer._delivery.issued == 0
    assert issuer.tick() == 12 == int(db.get(Keys("t1").issued))
    db.set(Keys("t1").issued, 5_000_000)
    issuer.recount()
    assert issuer.tick() == 12 and issuer._delivery.issued == 12, "nothing is known: they are issued again"
    reported = [fields[b"text"] for _, fields in db.xrange(Keys("t1").events)]
    assert len(reported) == 1 and b"is 5000000, but this run can have issued at most " in reported[0]
