"""Tasks: how many, which, and again after Redis has lost them."""

from __future__ import annotations

import pytest
import redis

from learner.data.questions import QuestionSet, fingerprint
from learner.data.sampler import Sampler
from learner.delivery.dead_letters import History
from learner.delivery.issue_limit import Reserved
from learner.delivery.issuer import Issuer
from learner.delivery.state import Books
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
def issuer(store: RunStore, run: RunSettings, sampler: Sampler) -> Issuer:
    epochs = run.checkpoint_dir / "epochs"
    epochs.mkdir(parents=True)
    warm = run.model_copy(update={"temperature": 0.7, "top_p": 0.95, "top_k": 50})
    made = Issuer(store, Books(), sampler, warm, Reserved(epochs), History(store))
    made.open.set()
    return made


def tasks(db: redis.Redis) -> list[Task]:
    return [decode_as(Task, fields[b"b"]) for _, fields in db.xrange(Keys("t1").tasks)]


def test_tasks_carry_the_question_and_how_to_sample(issuer: Issuer, db: redis.Redis, sampler: Sampler) -> None:
    assert issuer.turn() == 12
    made = tasks(db)
    assert [t.seq for t in made] == list(range(1, 13))
    assert all(t.question == sampler.question(t.seq) for t in made)
    assert {(t.group_size, t.attempt) for t in made} == {(4, 1)}
    assert all(t.sampling == Sampling(temperature=0.7, top_p=0.95, top_k=50) for t in made)


@pytest.mark.fault(48)
def test_nothing_is_issued_without_credit_or_with_the_valve_closed(issuer: Issuer, db: redis.Redis) -> None:
    issuer.turn()
    assert issuer.turn() == 0
    issuer._books.finish_step([1, 2, 3, 4], sampled=0, trained=0)
    issuer.open.clear()
    assert issuer.turn() == 0
    issuer.open.set()
    assert issuer.turn() == 4 and issuer._books.issued == 16


def test_a_reply_that_was_lost_does_not_issue_twice(issuer: Issuer, db: redis.Redis) -> None:
    issuer.turn()
    issuer._books.issued = 0  # as if the reply had never come
    issuer.turn()
    assert len(tasks(db)) == 12 and issuer._books.issued == 12


def test_after_a_wipe_everything_unsettled_is_issued_again_but_for_what_is_here(
    issuer: Issuer, db: redis.Redis, store: RunStore
) -> None:
    issuer.turn()
    books = issuer._books
    books.settle([1, 2, 5], Outcome.DEAD, "x")
    books.held |= {4, 7}
    db.flushall()
    with pytest.raises(Fenced):
        issuer.turn()
    store.acquire("me", 1, 60_000, takeover=False)
    store.own(2, "me")
    with pytest.raises(StateLost):
        issuer.turn()
    store.prepare()
    issuer.recount()
    issuer.turn()
    assert [t.seq for t in tasks(db)] == [3, 6, 8, 9, 10, 11, 12, 13, 14, 15]
    assert (books.issued, store.issued()) == (15, 15)


def test_what_is_due_is_issued_with_its_attempt(issuer: Issuer, db: redis.Redis) -> None:
    issuer.turn()
    issuer._books.failed_attempt(3, 1, 3, "corrupt")
    assert issuer.turn() == 1
    assert [(t.seq, t.attempt) for t in tasks(db)][-1] == (3, 2)
    assert (issuer._books.due, issuer._books.tally.reissued) == (set(), 1)


def test_a_learner_that_lost_the_lease_cannot_issue(issuer: Issuer, store: RunStore) -> None:
    store.acquire("rival", 1, 60_000, takeover=True)
    with pytest.raises(Fenced):
        issuer.turn()


def test_tasks_wait_until_the_disk_says_that_they_may_be_issued(issuer: Issuer, run: RunSettings) -> None:
    """A start would otherwise find more issued in Redis than its directory knows of, and refuse it."""
    epochs, away = run.checkpoint_dir / "epochs", run.checkpoint_dir / "away"
    epochs.rename(away)
    assert issuer.turn() == 0
    away.rename(epochs)
    assert issuer.turn() == 12
    assert Reserved(epochs).most() >= 12


def test_a_count_in_redis_that_nobody_can_have_issued_is_as_good_as_none(issuer: Issuer, db: redis.Redis) -> None:
    """`SET issued 5000000` made a list of five million seqs, and as many tasks."""
    db.set(Keys("t1").issued, 5_000_000)
    issuer.recount()
    assert issuer._books.issued == 0
    assert issuer.turn() == 12 == int(db.get(Keys("t1").issued))
    db.set(Keys("t1").issued, 5_000_000)
    issuer.recount()
    assert issuer.turn() == 12 and issuer._books.issued == 12, "nothing is known: they are issued again"
    told = [fields[b"text"] for _, fields in db.xrange(Keys("t1").events)]
    assert len(told) == 1 and b"says 5000000, but no more than " in told[0]
