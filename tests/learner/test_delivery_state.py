"""The delivery rules without Redis: credit, cap, attempts, and what a checkpoint lets go of."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.delivery.state import DeliveryState
from learner.delivery.token_accounting import ReceivedEntry, TokenOutcome
from protocol.errors import ForayError
from protocol.ledger import AlreadySettled, NotReopenable, Outcome


def limit(delivery: DeliveryState, steps: int = 10) -> int:
    return delivery.limit(max_lag=2, groups_per_step=4, steps=steps)


def test_credit_is_max_lag_plus_one_batches_beyond_what_is_settled() -> None:
    delivery = DeliveryState()
    assert limit(delivery) == 12
    delivery.commit_step([1, 2, 3, 4], sampled=40, trained=40)
    assert (limit(delivery), delivery.counters.tokens_trained) == (16, 40)


def test_never_more_seqs_are_open_than_the_remaining_steps_need() -> None:
    delivery = DeliveryState()
    assert limit(delivery, steps=2) == 8
    delivery.settle([3], Outcome.DEAD, "engine")
    assert limit(delivery, steps=2) == 9, "a dead seq makes room for another"
    delivery.commit_step([1, 2, 4, 5], sampled=0, trained=0)
    assert limit(delivery, steps=2) == 9
    assert limit(delivery, steps=1) == 5


@given(st.lists(st.sampled_from(["step", "dead"]), max_size=60), st.integers(1, 8), st.randoms())
def test_a_run_that_issues_up_to_the_limit_ends_with_nothing_in_flight(
    kinds: list[str], steps: int, random: Random
) -> None:
    delivery, kinds = DeliveryState(), list(kinds)
    while delivery.step < steps:
        delivery.issued = max(delivery.issued, limit(delivery, steps))
        open_ = delivery.in_flight()
        random.shuffle(open_)
        if kinds and kinds.pop() == "dead":
            delivery.settle(open_[:1], Outcome.DEAD, "x")
        else:
            assert len(open_) >= 4, "training never starves"
            delivery.commit_step(open_[:4], sampled=0, trained=0)
        assert delivery.issued - delivery.ledger.settled <= 12
    assert delivery.in_flight() == [] and delivery.inconsistency() == ""


def test_a_seq_is_settled_once() -> None:
    delivery = DeliveryState()
    delivery.settle([1], Outcome.STALE, "too_old")
    with pytest.raises(AlreadySettled):
        delivery.commit_step([1, 2], sampled=0, trained=0)
    assert delivery.step == 0


def came(delivery: DeliveryState, id_: bytes, seq: int, tokens: int = 10) -> None:
    """An entry arrives and is held, or is a duplicate."""
    arrived = ReceivedEntry(id_, tokens, tokens)
    delivery.receive(seq, arrived)
    if seq in delivery.pending or seq in delivery.ledger:
        delivery.accounting.record(TokenOutcome.DUPLICATE, tokens)
    else:
        delivery.mark_pending(seq, arrived)


def test_only_what_a_durable_checkpoint_has_decided_may_be_acknowledged() -> None:
    delivery = DeliveryState(issued=3)
    for id_, seq in ((b"1-0", 1), (b"2-0", 2), (b"3-0", 3), (b"4-0", 1)):
        came(delivery, id_, seq)
    delivery.settle([1], Outcome.DEAD, "x", tokens=10)
    state = delivery.to_state()
    delivery.settle([2], Outcome.DEAD, "x", tokens=10)  # settled while the checkpoint was written
    ids = delivery.mark_durable(state)
    assert ids == [b"1-0", b"4-0"]
    delivery.mark_acknowledged(ids)
    assert set(delivery.unacked) == {b"2-0", b"3-0"} and delivery.has_uncommitted()
    delivery.mark_acknowledged(delivery.mark_durable(delivery.to_state()))
    assert set(delivery.unacked) == {b"3-0"} and not delivery.has_uncommitted()


def test_a_failed_attempt_is_due_again_until_the_last_one() -> None:
    delivery = DeliveryState(issued=3)
    for attempt in (1, 2):
        delivery.record_failed_attempt(2, attempt, 3, "corrupt")
        assert delivery.due == {2} and delivery.attempts == {2: attempt + 1}
        delivery.record_failed_attempt(2, attempt, 3, "corrupt")  # the same entry seen twice counts once
        delivery.due.clear()  # issued again
    delivery.record_failed_attempt(2, 1, 3, "corrupt")  # a header that cannot be read says attempt 1
    assert 2 in delivery.ledger and delivery.ledger.notes == {2: (Outcome.DEAD, "corrupt")}


def test_state_is_restored_from_a_checkpoint_and_an_inconsistent_one_is_refused() -> None:
    delivery = DeliveryState(issued=9)
    for seq in (1, 2, 4, 5):
        came(delivery, b"%d-0" % seq, seq)
    delivery.commit_step([1, 2, 5], sampled=30, trained=26)
    delivery.settle([4], Outcome.STALE, "too_old", tokens=10)
    delivery.record_failed_attempt(7, 1, 3, "corrupt")
    again = DeliveryState()
    again.restore(json.loads(json.dumps(delivery.to_state())))
    assert (again.step, again.ledger, again.counters) == (1, delivery.ledger, delivery.counters)
    assert (
        again.committed == again.ledger and again.accounting == delivery.accounting and again.accounting.generated == 40
    )
    assert (again.due, again.attempts) == ({7}, {7: 2})
    assert set(again.unacked) == {b"1-0", b"2-0", b"4-0", b"5-0"}, "they may not have been acknowledged"
    broken = delivery.to_state()
    broken["ledger"]["counts"]["trained"] = 9
    with pytest.raises(ForayError, match="is inconsistent"):
        DeliveryState().restore(broken)


def test_what_is_settled_was_issued_even_when_redis_has_lost_count() -> None:
    delivery = DeliveryState(issued=4)  # as recounted in a Redis that lost its last second; seq 5 had been read before
    delivery.commit_step([1, 2, 3, 4, 5], sampled=0, trained=0)
    assert delivery.issued == 5 and delivery.inconsistency() == ""


def test_inconsistent_accounting_is_located() -> None:
    delivery = DeliveryState(issued=3)
    delivery.commit_step([1, 2], sampled=0, trained=0)
    assert delivery.inconsistency() == "" and delivery.in_flight() == [3]
    delivery.counters.taken = 5
    assert "2 seqs are recorded as trained, 5 groups were trained" in delivery.inconsistency()
    delivery.counters.taken, delivery.issued = 2, 1
    assert "1 issued, but 2 settled" in delivery.inconsistency()


def test_a_checkpoint_without_token_accounting_is_resumed_and_counting_begins_there() -> None:
    delivery = DeliveryState(issued=2)
    delivery.commit_step([1, 2], sampled=0, trained=0)
    state = delivery.to_state()
    for name in ("tokens", "entries", "due", "attempts", "requests"):
        del state[name]
    for name in ("poisoned", "requeued", "state_lost", "lease_lapsed"):
        del state["tally"][name]
    again = DeliveryState(issued=2)
    again.restore(state)
    assert again.inconsistency() == "" and again.accounting.generated == 0 and again.mark_durable(state) == []


def test_missing_or_doubled_tokens_are_reported_with_their_number() -> None:
    delivery = DeliveryState(issued=2)
    came(delivery, b"1-0", 1)
    came(delivery, b"2-0", 2)
    delivery.commit_step([1], sampled=10, trained=7)
    assert delivery.inconsistency() == ""
    delivery.accounting.totals[TokenOutcome.MASKED] -= 3
    assert "20 tokens were generated" in delivery.inconsistency() and delivery.inconsistency().endswith(
        "= 17: 3 are missing"
    )
    delivery.accounting.record(TokenOutcome.STALE, 5)
    assert delivery.inconsistency().endswith("= 22: 2 too many")


def test_a_requested_seq_is_due_again_with_all_its_attempts() -> None:
    delivery = DeliveryState(issued=4)
    for _ in range(3):
        delivery.record_failed_attempt(2, 3, 3, "corrupt")
    delivery.commit_step([1, 3], sampled=0, trained=0)
    assert delivery.reopen(2) == "dead (corrupt)"
    assert (delivery.due, delivery.attempts, delivery.requeue_requests, delivery.in_flight()) == ({2}, {}, {2}, [2, 4])
    assert delivery.inconsistency() == "" and delivery.filtered_counts() == {}
    with pytest.raises(NotReopenable, match="seq 1 is trained"):
        delivery.reopen(1)
    again = DeliveryState(issued=4)
    again.restore(delivery.to_state())
    assert again.in_flight() == [2, 4] and again.requeue_requests == {2} and again.inconsistency() == ""
    delivery.commit_step([2, 4], sampled=0, trained=0)
    assert delivery.inconsistency() == "" and delivery.ledger.watermark == 4


def test_after_the_last_step_nothing_is_opened_again() -> None:
    delivery = DeliveryState(issued=1)
    delivery.record_failed_attempt(1, 3, 3, "corrupt")
    delivery.finished = True  # the simulation's seed 21844: asked between the last step and the last look
    with pytest.raises(NotReopenable, match="last step"):
        delivery.reopen(1)
    assert delivery.in_flight() == [] and delivery.requeue_requests == set() and delivery.inconsistency() == ""


@given(st.data())
def test_token_accounting_holds_through_any_deliveries_crashes_and_acknowledgements(data: st.DataObject) -> None:
    """A stream of entries, and learners that crash at any moment: every entry is counted once in what survives."""
    stream: dict[bytes, tuple[int, int]] = {}  # pending and unread, as Redis has them
    published, delivery, state = 0, DeliveryState(issued=9), None
    for number in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(["publish", "read", "train", "dead", "checkpoint", "acknowledge", "crash"]))
        if act == "publish":
            stream[b"%d-0" % (number + 1)] = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 50))
            published += stream[b"%d-0" % (number + 1)][1]
        elif act == "read":
            for id_, (seq, tokens) in stream.items():
                if id_ not in delivery.unacked and data.draw(st.booleans()):
                    came(delivery, id_, seq, tokens)
        elif act in ("train", "dead") and delivery.pending:
            seq = data.draw(st.sampled_from(sorted(delivery.pending)))
            tokens = delivery.accounting.pending[seq].tokens
            if act == "train":
                delivery.commit_step([seq], sampled=tokens, trained=data.draw(st.integers(0, tokens)))
            else:
                delivery.settle([seq], Outcome.DEAD, "x", tokens=tokens)
        elif act == "checkpoint":
            state = delivery.to_state()
            delivery.mark_durable(state)
        elif act == "acknowledge" and state is not None:
            ids = delivery.mark_durable(state)
            for id_ in ids[: data.draw(st.integers(0, len(ids)))]:
                stream.pop(id_, None)
                delivery.mark_acknowledged([id_])
        elif act == "crash":
            delivery = DeliveryState(issued=9)
            if state is not None:
                delivery.restore(state)
        assert delivery.inconsistency() == ""
        unread = sum(tokens for id_, (_, tokens) in stream.items() if id_ not in delivery.unacked)
        assert published == delivery.accounting.received_counted + unread, (
            "whatever happens, nothing is lost and nothing counted twice"
        )


def test_the_rate_of_a_step_counts_what_arrived_since_the_last_one_also_after_a_resume() -> None:
    delivery = DeliveryState()
    delivery.receive(1, ReceivedEntry(b"1-0", 600, 600))
    assert delivery.step_counts(2.0) == {"settled": 0, "dead": 0, "tokens_generated_per_s": 300.0}
    assert delivery.step_counts(2.0)["tokens_generated_per_s"] == 0.0, "no token counts twice"
    delivery.mark_pending(1, ReceivedEntry(b"1-0", 600, 600))
    delivery.settle([1], Outcome.DEAD, "prompt_too_long", tokens=600)
    resumed = DeliveryState()
    resumed.restore(delivery.to_state())
    resumed.receive(2, ReceivedEntry(b"2-0", 50, 50))
    assert resumed.step_counts(0.5) == {"settled": 1, "dead": 1, "tokens_generated_per_s": 100.0}
