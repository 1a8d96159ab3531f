"""The ledger: the outcome of every seq. The copy in the learner's checkpoint is authoritative.

A seq is settled once, as trained, filtered, stale or dead. `watermark` is the highest seq up to which all seqs are
settled. `above` holds the settled seqs beyond it; the credit gate keeps it small. A user may requeue a dead or stale
seq: it is then open again below the watermark, and `reopened` holds it.

Memory, `to_state` and `from_state` are O(dead and stale seqs + above): trained and filtered seqs are only counted, so
one below the watermark is either. `settle` and `reopen` are O(1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from protocol.errors import ForayError


class Outcome(StrEnum):
    """The outcome of a settled seq."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    DEAD = "dead"


REOPENABLE = frozenset({Outcome.STALE, Outcome.DEAD})
"""Outcomes that may be reopened: their data was not trained on."""


class AlreadySettled(ForayError):
    """A seq would be settled a second time: a bug that must not reach the optimiser."""


class NotReopenable(ForayError):
    """The seq is open, trained or filtered, so it cannot be reopened. The message names its state."""


@dataclass
class Ledger:
    """The outcome of every seq, mutable. `to_state` and `from_state` convert to and from the checkpoint's form."""

    watermark: int = 0
    above: set[int] = field(default_factory=set)
    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    notes: dict[int, tuple[Outcome, str]] = field(default_factory=dict)
    """seq -> (outcome, reason) of every dead or stale seq."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Reason -> number of filtered seqs."""
    reopened: set[int] = field(default_factory=set)
    """Requeued seqs at or below the watermark."""

    def __contains__(self, seq: int) -> bool:
        return (seq <= self.watermark and seq not in self.reopened) or seq in self.above

    @property
    def settled(self) -> int:
        """Return how many seqs are settled."""
        return self.watermark - len(self.reopened) + len(self.above)

    def settle(self, seq: int, outcome: Outcome, reason: str = "") -> None:
        """Record the outcome of `seq`. Raises AlreadySettled if it has one, ValueError below 1."""
        if seq < 1:
            raise ValueError(f"seq {seq} is below 1")
        if seq in self:
            raise AlreadySettled(f"seq {seq} is already settled; refusing to book it as {outcome}")
        if seq in self.reopened:
            self.reopened.remove(seq)
        else:
            self.above.add(seq)
        self.counts[outcome] += 1
        if outcome is Outcome.FILTERED:
            self.filtered[reason] += 1
        elif outcome is not Outcome.TRAINED:
            self.notes[seq] = outcome, reason
        while self.watermark + 1 in self.above:
            self.watermark += 1
            self.above.remove(self.watermark)

    def reopen(self, seq: int) -> tuple[Outcome, str]:
        """Remove the outcome of `seq` and return it with its reason. Raises NotReopenable."""
        if seq not in self.notes:
            raise NotReopenable(f"seq {seq} is {self.state_of(seq)}: only dead and stale seqs can be requeued")
        outcome, reason = self.notes.pop(seq)
        self.counts[outcome] -= 1
        if seq <= self.watermark:
            self.reopened.add(seq)
        else:
            self.above.remove(seq)
        return outcome, reason

    def state_of(self, seq: int) -> str:
        """Return the outcome of `seq`, "trained or filtered" where it can be both, "not settled" if it has none."""
        if seq in self.notes:
            return str(self.notes[seq][0])
        if seq < 1 or seq not in self:
            return "not settled"
        return "trained or filtered" if self.counts[Outcome.FILTERED] else str(Outcome.TRAINED)

    def missing(self, issued: int) -> list[int]:
        """Return the seqs in [1, issued] that are not settled, ascending."""
        return sorted(self.reopened) + [seq for seq in range(self.watermark + 1, issued + 1) if seq not in self.above]

    def open(self, issued: int) -> int:
        """Return how many seqs `missing` would return."""
        settled = sum(seq <= issued for seq in self.above)
        return len(self.reopened) + max(0, issued - self.watermark) - settled

    def closes(self) -> bool:
        """Return whether the counts per outcome add up to the number of settled seqs."""
        return sum(self.counts.values()) == self.settled

    def to_state(self) -> dict[str, Any]:
        """Return the ledger as plain JSON values."""
        return {
            "watermark": self.watermark,
            "above": sorted(self.above),
            "counts": {str(k): v for k, v in self.counts.items()},
            "notes": [[seq, str(outcome), reason] for seq, (outcome, reason) in self.notes.items()],
            "filtered": dict(self.filtered),
            "reopened": sorted(self.reopened),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        """Return the ledger that `to_state` wrote, also that of older versions, in which filtered seqs have notes.

        Raises ForayError if the values are invalid or inconsistent.
        """
        try:
            notes = {int(seq): (Outcome(outcome), str(reason)) for seq, outcome, reason in state["notes"]}
            noted = Counter(reason for outcome, reason in notes.values() if outcome is Outcome.FILTERED)
            ledger = cls(
                watermark=int(state["watermark"]),
                above={int(seq) for seq in state["above"]},
                counts=dict.fromkeys(Outcome, 0) | {Outcome(k): int(v) for k, v in state["counts"].items()},
                notes={seq: note for seq, note in notes.items() if note[0] in REOPENABLE},
                filtered=noted + Counter({str(k): int(v) for k, v in state.get("filtered", {}).items()}),
                reopened={int(seq) for seq in state.get("reopened", ())},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ForayError(
                f"the ledger in the checkpoint is invalid: {type(error).__name__}: {str(error)[:200]}"
            ) from None
        wrong = any(seq <= ledger.watermark + 1 for seq in ledger.above)
        wrong = wrong or any(not 1 <= seq <= ledger.watermark for seq in ledger.reopened)
        if wrong or not ledger.closes():
            raise ForayError("the ledger in the checkpoint is inconsistent: refusing to resume from it")
        return ledger
