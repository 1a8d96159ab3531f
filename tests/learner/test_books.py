"""The delivery rules without Redis: credit, cap, attempts, and what a checkpoint lets go of."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.books import Books
from protocol.errors import ForayError
from protocol.ledger import AlreadySettled, Outcome


def limit(books: Books, steps: int = 10) -> int:
    return books.limit(max_lag=2, groups_per_step=4, steps=steps)


def test_credit_is_max_lag_plus_one_batches_beyond_what_is_settled() -> None:
    books = Books()
    assert limit(books) == 12
    books.finish_step([1, 2, 3, 4], sampled=40, trained=40)
    assert (limit(books), books.tally.tokens_trained) == (16, 40)


def test_never_more_seqs_are_open_than_the_remaining_steps_need() -> None:
    books = Books()
    assert limit(books, steps=2) == 8
    books.settle([3], Outcome.DEAD, "engine")
    assert limit(books, steps=2) == 9, "a dead seq makes room for another"
    books.finish_step([1, 2, 4, 5], sampled=0, trained=0)
    assert limit(books, steps=2) == 9
    assert limit(books, steps=1) == 5


@given(st.lists(st.sampled_from(["step", "dead"]), max_size=60), st.integers(1, 8), st.randoms())
def test_a_run_that_issues_up_to_the_limit_ends_with_nothing_in_flight(
    kinds: list[str], steps: int, random: Random
) -> None:
    books, kinds = Books(), list(kinds)
    while books.step < steps:
        books.issued = max(books.issued, limit(books, steps))
        open_ = books.in_flight()
        random.shuffle(open_)
        if kinds and kinds.pop() == "dead":
            books.settle(open_[:1], Outcome.DEAD, "x")
        else:
            assert len(open_) >= 4, "training never starves"
            books.finish_step(open_[:4], sampled=0, trained=0)
        assert books.issued - books.ledger.settled <= 12
    assert books.in_flight() == [] and books.check() == ""


def test_a_seq_is_settled_once() -> None:
    books = Books()
    books.settle([1], Outcome.STALE, "too_old")
    with pytest.raises(AlreadySettled):
        books.finish_step([1, 2], sampled=0, trained=0)
    assert books.step == 0


def test_only_what_a_durable_checkpoint_has_settled_may_be_acknowledged() -> None:
    books = Books(unacked={b"1-0": 1, b"2-0": 2, b"3-0": 3, b"4-0": 1}, issued=3)
    books.settle([1], Outcome.DEAD, "x")
    state = books.to_state()
    books.settle([2], Outcome.DEAD, "x")  # settled while the checkpoint was written
    ids = books.commit(state)
    assert ids == [b"1-0", b"4-0"]
    books.forget(ids)
    assert set(books.unacked) == {b"2-0", b"3-0"}


def test_a_failed_attempt_is_due_again_until_the_last_one() -> None:
    books = Books(issued=3)
    for attempt in (1, 2):
        books.failed_attempt(2, attempt, 3, "corrupt")
        assert books.due == {2} and books.attempts == {2: attempt + 1}
        books.failed_attempt(2, attempt, 3, "corrupt")  # the same entry seen twice counts once
        books.due.clear()  # issued again
    books.failed_attempt(2, 1, 3, "corrupt")  # a header that cannot be read says attempt 1
    assert 2 in books.ledger and books.ledger.notes == [(2, Outcome.DEAD, "corrupt")]


def test_books_come_back_from_a_checkpoint_and_refuse_one_that_does_not_close() -> None:
    books = Books(issued=9)
    books.finish_step([1, 2, 5], sampled=7, trained=6)
    books.settle([4], Outcome.STALE, "too_old")
    again = Books()
    again.restore(books.to_state())
    assert (again.step, again.ledger, again.tally) == (1, books.ledger, books.tally)
    assert again.committed == again.ledger
    broken = books.to_state()
    broken["ledger"]["counts"]["trained"] = 9
    with pytest.raises(ForayError, match="does not close"):
        Books().restore(broken)


def test_books_that_do_not_close_say_where() -> None:
    books = Books(issued=3)
    books.finish_step([1, 2], sampled=0, trained=0)
    assert books.check() == "" and books.in_flight() == [3]
    books.tally.taken = 5
    assert "2 seqs are booked as trained, 5 groups were trained" in books.check()
    books.tally.taken, books.issued = 2, 1
    assert "1 issued, but 2 settled" in books.check()
