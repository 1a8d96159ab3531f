"""The ledger stays consistent for any order of settling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ForayError
from protocol.ledger import REOPENABLE, AlreadySettled, Ledger, NotReopenable, Outcome

outcomes = st.sampled_from(list(Outcome))


@pytest.mark.fault(33)
@given(st.permutations(range(1, 25)), st.lists(outcomes, min_size=24, max_size=24), st.integers(0, 24))
def test_any_order_settles_each_seq_once_and_the_accounting_is_consistent(
    order: list[int], results: list[Outcome], cut: int
) -> None:
    ledger = Ledger()
    done = order[:cut]
    for seq, outcome in zip(done, results, strict=False):
        ledger.settle(seq, outcome, "because")
        with pytest.raises(AlreadySettled):
            ledger.settle(seq, Outcome.TRAINED)
        assert ledger.closes()
    contiguous = next(n for n in range(26) if n + 1 not in done)
    assert ledger.watermark == contiguous
    assert ledger.settled == cut
    assert ledger.missing(24) == sorted(set(order) - set(done))
    assert [ledger.open(n) for n in range(25)] == [len(ledger.missing(n)) for n in range(25)]
    assert all((seq in ledger) == (seq in done) for seq in range(1, 25))
    again = Ledger.from_state(ledger.to_state())
    assert again == ledger


def test_the_reason_of_what_was_not_trained_is_kept() -> None:
    ledger = Ledger()
    ledger.settle(2, Outcome.DEAD, "no_engine")
    ledger.settle(1, Outcome.TRAINED)
    ledger.settle(3, Outcome.FILTERED, "no_variance")
    assert ledger.notes == {2: (Outcome.DEAD, "no_engine")} and ledger.watermark == 3
    assert ledger.filtered == {"no_variance": 1}
    assert [ledger.state_of(seq) for seq in (0, 1, 2, 4)] == [
        "not settled",
        "trained or filtered",
        "dead",
        "not settled",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"watermark": 7},
        {"above": [1]},
        {"watermark": 1, "above": [2, 5]},
        {"counts": {"trained": 9}},
        {"reopened": [9]},
        {"reopened": [1]},
    ],
)
def test_an_inconsistent_ledger_is_refused(change: dict[str, object]) -> None:
    ledger = Ledger()
    for seq in (1, 2, 5):
        ledger.settle(seq, Outcome.TRAINED)
    with pytest.raises(ForayError, match="is inconsistent"):
        Ledger.from_state({**ledger.to_state(), **change})


def test_seq_starts_at_one() -> None:
    with pytest.raises(ValueError, match="below 1"):
        Ledger().settle(0, Outcome.TRAINED)


@pytest.mark.slow
@given(st.data())
def test_what_is_dead_or_stale_can_be_opened_again_and_is_settled_once_more(data: st.DataObject) -> None:
    """Against a plain dictionary, over any order of settling and reopening."""
    ledger, model = Ledger(), {}
    for _ in range(data.draw(st.integers(0, 60))):
        seq = data.draw(st.integers(1, 12))
        if data.draw(st.booleans()):
            outcome = data.draw(outcomes)
            if seq in model:
                with pytest.raises(AlreadySettled):
                    ledger.settle(seq, outcome, "because")
            else:
                ledger.settle(seq, outcome, "because")
                model[seq] = outcome
        elif model.get(seq) in (Outcome.DEAD, Outcome.STALE):
            assert ledger.reopen(seq) == (model.pop(seq), "because")
        else:
            with pytest.raises(NotReopenable, match=f"seq {seq} is .*{model.get(seq, 'not settled')}"):
                ledger.reopen(seq)
        assert ledger.settled == len(model) and ledger.closes()
        assert ledger.missing(12) == [s for s in range(1, 13) if s not in model]
        assert all((s in ledger) == (s in model) for s in range(1, 13))
        assert {s: o for s, (o, _) in ledger.notes.items()} == {s: o for s, o in model.items() if o in REOPENABLE}
        assert ledger.filtered.total() == sum(o is Outcome.FILTERED for o in model.values())
        assert Ledger.from_state(ledger.to_state()) == ledger


def test_a_ledger_of_an_older_version_is_read() -> None:
    state = Ledger().to_state()
    del state["reopened"], state["filtered"]
    assert Ledger.from_state(state) == Ledger()


def test_an_older_ledger_with_a_note_for_each_filtered_seq_counts_them() -> None:
    ledger = Ledger()
    for seq, outcome in enumerate((Outcome.FILTERED, Outcome.DEAD, Outcome.FILTERED, Outcome.STALE), 1):
        ledger.settle(seq, outcome, f"why{outcome}")
    state = ledger.to_state()
    del state["filtered"]
    state["notes"] += [[1, "filtered", "whyfiltered"], [3, "filtered", "whyfiltered"]]
    assert Ledger.from_state(state) == ledger and ledger.filtered == {"whyfiltered": 2}


def filtered(count: int, dead: int = 3) -> Ledger:
    ledger = Ledger()
    for seq in range(1, count + 1):
        ledger.settle(seq, Outcome.FILTERED, "no_variance" if seq % 2 else "excess")
    for seq in range(count + 1, count + dead + 1):
        ledger.settle(seq, Outcome.DEAD, "engine")
    return ledger


def test_a_manifest_does_not_grow_with_filtered_questions() -> None:
    small, large = (len(json.dumps(filtered(count).to_state())) for count in (1_000, 30_000))
    assert large - small < 20, "a few digits"


def test_a_seq_is_reopened_without_a_search() -> None:
    """Counts how many notes are looked at, by any way to iterate over them."""
    looked = []

    class Notes(dict[int, tuple[Outcome, str]]):
        def __iter__(self) -> Iterator[int]:
            return iter([looked.append(seq) or seq for seq in super().__iter__()])

        def items(self) -> Any:
            return [(seq, self[seq]) for seq in self]

        def values(self) -> Any:
            return [self[seq] for seq in self]

    for dead in (10, 1000):
        ledger = filtered(5, dead)
        ledger.notes = Notes(ledger.notes)
        assert ledger.reopen(5 + dead) == (Outcome.DEAD, "engine")
        with pytest.raises(NotReopenable):
            ledger.reopen(1)
    assert not looked
