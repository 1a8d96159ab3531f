"""The delivery rules without Redis: credit, cap, attempts, and what a checkpoint lets go of."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.delivery.state import Books
from learner.delivery.token_accounting import Arrived, Bucket
from protocol.errors import ForayError
from protocol.ledger import AlreadySettled, NotReopenable, Outcome


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


def came(books: Books, id_: bytes, seq: int, tokens: int = 10) -> None:
    """An entry arrives and is held, or is a duplicate."""
    arrived = Arrived(id_, tokens, tokens)
    books.arrive(seq, arrived)
    if seq in books.held or seq in books.ledger:
        books.law.book(Bucket.DUPLICATE, tokens)
    else:
        books.hold(seq, arrived)


def test_only_what_a_durable_checkpoint_has_decided_may_be_acknowledged() -> None:
    books = Books(issued=3)
    for id_, seq in ((b"1-0", 1), (b"2-0", 2), (b"3-0", 3), (b"4-0", 1)):
        came(books, id_, seq)
    books.settle([1], Outcome.DEAD, "x", tokens=10)
    state = books.to_state()
    books.settle([2], Outcome.DEAD, "x", tokens=10)  # settled while the checkpoint was written
    ids = books.commit(state)
    assert ids == [b"1-0", b"4-0"]
    books.forget(ids)
    assert set(books.unacked) == {b"2-0", b"3-0"} and books.changed()
    books.forget(books.commit(books.to_state()))
    assert set(books.unacked) == {b"3-0"} and not books.changed()


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
    for seq in (1, 2, 4, 5):
        came(books, b"%d-0" % seq, seq)
    books.finish_step([1, 2, 5], sampled=30, trained=26)
    books.settle([4], Outcome.STALE, "too_old", tokens=10)
    books.failed_attempt(7, 1, 3, "corrupt")
    again = Books()
    again.restore(json.loads(json.dumps(books.to_state())))
    assert (again.step, again.ledger, again.tally) == (1, books.ledger, books.tally)
    assert again.committed == again.ledger and again.law == books.law and again.law.generated == 40
    assert (again.due, again.attempts) == ({7}, {7: 2})
    assert set(again.unacked) == {b"1-0", b"2-0", b"4-0", b"5-0"}, "perhaps nobody has acknowledged them"
    broken = books.to_state()
    broken["ledger"]["counts"]["trained"] = 9
    with pytest.raises(ForayError, match="does not close"):
        Books().restore(broken)


def test_what_is_settled_was_issued_even_when_redis_has_lost_count() -> None:
    books = Books(issued=4)  # as recounted in a Redis that lost its last second; seq 5 had been read before
    books.finish_step([1, 2, 3, 4, 5], sampled=0, trained=0)
    assert books.issued == 5 and books.check() == ""


def test_books_that_do_not_close_say_where() -> None:
    books = Books(issued=3)
    books.finish_step([1, 2], sampled=0, trained=0)
    assert books.check() == "" and books.in_flight() == [3]
    books.tally.taken = 5
    assert "2 seqs are booked as trained, 5 groups were trained" in books.check()
    books.tally.taken, books.issued = 2, 1
    assert "1 issued, but 2 settled" in books.check()


def test_a_checkpoint_of_an_older_version_is_resumed_and_the_law_begins_there() -> None:
    books = Books(issued=2)
    books.finish_step([1, 2], sampled=0, trained=0)
    state = books.to_state()
    for name in ("tokens", "entries", "due", "attempts", "requests"):
        del state[name]
    for name in ("poisoned", "requeued", "state_lost", "lease_lapsed"):
        del state["tally"][name]
    again = Books(issued=2)
    again.restore(state)
    assert again.check() == "" and again.law.generated == 0 and again.commit(state) == []


def test_tokens_that_went_nowhere_or_twice_are_told_with_their_number() -> None:
    books = Books(issued=2)
    came(books, b"1-0", 1)
    came(books, b"2-0", 2)
    books.finish_step([1], sampled=10, trained=7)
    assert books.check() == ""
    books.law.buckets[Bucket.UNTRAINED] -= 3
    assert "20 tokens were generated" in books.check() and books.check().endswith("= 17: 3 are missing")
    books.law.book(Bucket.STALE, 5)
    assert books.check().endswith("= 22: 2 too many")


def test_a_seq_that_a_person_asks_for_is_due_again_with_all_its_attempts() -> None:
    books = Books(issued=4)
    for _ in range(3):
        books.failed_attempt(2, 3, 3, "corrupt")
    books.finish_step([1, 3], sampled=0, trained=0)
    assert books.reopen(2) == "dead (corrupt)"
    assert (books.due, books.attempts, books.requests, books.in_flight()) == ({2}, {}, {2}, [2, 4])
    assert books.check() == "" and books.filtered() == {}
    with pytest.raises(NotReopenable, match="seq 1 is trained"):
        books.reopen(1)
    again = Books(issued=4)
    again.restore(books.to_state())
    assert again.in_flight() == [2, 4] and again.requests == {2} and again.check() == ""
    books.finish_step([2, 4], sampled=0, trained=0)
    assert books.check() == "" and books.ledger.watermark == 4


def test_after_the_last_step_nothing_is_opened_again() -> None:
    books = Books(issued=1)
    books.failed_attempt(1, 3, 3, "corrupt")
    books.closed = True  # the simulation's seed 21844: asked between the last step and the last look
    with pytest.raises(NotReopenable, match="last step"):
        books.reopen(1)
    assert books.in_flight() == [] and books.requests == set() and books.check() == ""


@given(st.data())
def test_the_law_by_token_holds_through_any_deliveries_crashes_and_acknowledgements(data: st.DataObject) -> None:
    """A stream of entries, and learners that crash at any moment: every entry is counted once in what survives."""
    stream: dict[bytes, tuple[int, int]] = {}  # pending and unread, as Redis has them
    published, books, state = 0, Books(issued=9), None
    for number in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(["publish", "read", "train", "dead", "checkpoint", "acknowledge", "crash"]))
        if act == "publish":
            stream[b"%d-0" % (number + 1)] = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 50))
            published += stream[b"%d-0" % (number + 1)][1]
        elif act == "read":
            for id_, (seq, tokens) in stream.items():
                if id_ not in books.unacked and data.draw(st.booleans()):
                    came(books, id_, seq, tokens)
        elif act in ("train", "dead") and books.held:
            seq = data.draw(st.sampled_from(sorted(books.held)))
            tokens = books.law.flying[seq].tokens
            if act == "train":
                books.finish_step([seq], sampled=tokens, trained=data.draw(st.integers(0, tokens)))
            else:
                books.settle([seq], Outcome.DEAD, "x", tokens=tokens)
        elif act == "checkpoint":
            state = books.to_state()
            books.commit(state)
        elif act == "acknowledge" and state is not None:
            ids = books.commit(state)
            for id_ in ids[: data.draw(st.integers(0, len(ids)))]:
                stream.pop(id_, None)
                books.forget([id_])
        elif act == "crash":
            books = Books(issued=9)
            if state is not None:
                books.restore(state)
        assert books.check() == ""
        unread = sum(tokens for id_, (_, tokens) in stream.items() if id_ not in books.unacked)
        assert published == books.law.received + unread, "whatever happens, nothing is lost and nothing counted twice"
