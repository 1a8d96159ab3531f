"""Token accounting: the outcome of every token of the received stream entries.

    generated = trained + masked + filtered + stale + failed + duplicate + in flight

`generated` is counted on arrival, before any decision, from the publisher's count (`t`, else the header). The other
side is counted where the outcome is decided, from the groups themselves. So a group that is lost on the way, or
recorded twice, shows as a difference of its tokens.

trained    had a gradient                     masked  in trained groups, but masked (stale, orphan, invalid, ...),
                                              or in an update that was not finite
filtered   of groups without a signal         stale      of groups too old as a whole
failed     of unreadable, poisonous, failed and non-finite groups
duplicate  of entries whose seq had arrived or was settled already
in flight  of groups without an outcome yet

Only tokens of finished attempts are counted here, not what a killed rollout server had generated. Redis counts the
attempts that were rejected (`Keys.tokens`, `rejected`); they are shown beside these totals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from protocol.ledger import Outcome
from protocol.messages import TrajectoryGroup

if TYPE_CHECKING:
    from learner.data.batch import Batch


class TokenOutcome(StrEnum):
    """Outcome of a token. The values are names in checkpoints and metrics."""

    TRAINED = "trained"
    MASKED = "masked"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    DUPLICATE = "duplicate"


TOKEN_OUTCOME = {
    Outcome.FILTERED: TokenOutcome.FILTERED,
    Outcome.STALE: TokenOutcome.STALE,
    Outcome.DEAD: TokenOutcome.FAILED,
}
"""Ledger outcome of a seq that was not trained -> outcome of its tokens."""


class ReceivedEntry(NamedTuple):
    """Token counts of a stream entry on arrival.

    tokens   tokens sampled for it
    counted  tokens that Redis counted on publication
    """

    id: bytes
    tokens: int
    counted: int


class TokenSplit(NamedTuple):
    """Tokens of trained groups with a gradient, and without one (masked)."""

    trained: int
    masked: int


@dataclass
class TokenAccounting:
    """Counts tokens by outcome. Not thread-safe: `DeliveryState` guards it with its lock.

    generated         tokens of all received entries
    received_counted  the same, as counted by Redis on publication
    totals            tokens by outcome
    pending           seq -> entry, for entries without an outcome yet
    """

    generated: int = 0
    received_counted: int = 0
    totals: dict[TokenOutcome, int] = field(default_factory=lambda: dict.fromkeys(TokenOutcome, 0))
    pending: dict[int, ReceivedEntry] = field(default_factory=dict)

    def receive(self, entry: ReceivedEntry) -> None:
        """Count the tokens of a new stream entry. Every entry is later recorded once with `record`."""
        self.generated += entry.tokens
        self.received_counted += entry.counted

    def mark_pending(self, seq: int, entry: ReceivedEntry) -> None:
        """Track an entry without an outcome yet."""
        self.pending[seq] = entry

    def settle(self, seq: int) -> None:
        """Stop tracking `seq`: its outcome is recorded."""
        self.pending.pop(seq, None)

    def record(self, outcome: TokenOutcome, tokens: int) -> None:
        """Add `tokens` to an outcome's total."""
        self.totals[outcome] += tokens

    @property
    def pending_tokens(self) -> int:
        """Return the tokens of entries without an outcome yet."""
        return sum(entry.tokens for entry in self.pending.values())

    def inconsistency(self) -> str:
        """Return how the totals differ from `generated`, "" if they are equal."""
        ended = sum(self.totals.values()) + self.pending_tokens
        if ended == self.generated:
            return ""
        parts = " + ".join(
            f"{tokens} {outcome}" for outcome, tokens in [*self.totals.items(), ("in flight", self.pending_tokens)]
        )
        how = (
            f"{self.generated - ended} are missing" if ended < self.generated else f"{ended - self.generated} too many"
        )
        return f"{self.generated} tokens were generated, but {parts} = {ended}: {how}"

    def values(self) -> dict[str, float]:
        """Return the totals for the metrics."""
        named = {f"token_accounting_{outcome}": float(tokens) for outcome, tokens in self.totals.items()}
        return named | {
            "tokens_generated_total": float(self.generated),
            "token_accounting_in_flight": float(self.pending_tokens),
            "token_accounting_consistent": float(not self.inconsistency()),
        }

    def to_state(self) -> dict[str, Any]:
        """Return the recorded totals as JSON values. Pending entries are not acknowledged and will be received
        again."""
        pending = self.pending.values()
        return {
            "generated": self.generated - sum(entry.tokens for entry in pending),
            "received": self.received_counted - sum(entry.counted for entry in pending),
            "buckets": {str(outcome): tokens for outcome, tokens in self.totals.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TokenAccounting:
        """Inverse of `to_state`. Checkpoints of versions without token accounting have {}: counting starts there."""
        totals = {TokenOutcome(name): int(tokens) for name, tokens in state.get("buckets", {}).items()}
        return cls(
            generated=int(state.get("generated", 0)),
            received_counted=int(state.get("received", 0)),
            totals=dict.fromkeys(TokenOutcome, 0) | totals,
        )


def token_split(batch: Batch, groups: Sequence[TrajectoryGroup], own: int, minibatches: int | None) -> TokenSplit:
    """Count the tokens of the first `own` of `groups` that are trained in the first `minibatches` of `batch` (None:
    all), and the others, masked ones.

    The other groups are replayed: their tokens were recorded at their first training.
    """
    order = sorted(range(len(groups)), key=lambda i: (groups[i].seq, groups[i].attempt))  # the numbering of build_batch
    pairs = [(i, trajectory) for i in order for trajectory in groups[i].trajectories]
    counts = np.zeros(len(pairs), np.int64)
    for micro_batch in chain(*batch.minibatches[:minibatches]):
        counts += np.bincount(micro_batch.trajectory, minlength=len(pairs))
    ours = [(int(counts[n]), int(t.mask.sum())) for n, (i, t) in enumerate(pairs) if i < own]
    return TokenSplit(sum(used for used, _ in ours), sum(sampled - used for used, sampled in ours))
