"""Conservation by token: where every token went that a received entry brought.

    generated = trained + untrained + filtered + stale + failed + duplicate + in flight

`generated` is counted on arrival, before anything is decided, from what the publisher says (`t`, else the header). The
other side is counted where the decision falls, from the groups themselves. So a group that is dropped on the way, or
booked twice, shows as a difference of so many tokens.

trained    had a gradient                     untrained  in trained groups, but masked (stale, orphan, not voting, ...)
filtered   of groups that teach nothing       stale      of groups too old as a whole
failed     of unreadable, poisonous, failed and not finite groups
duplicate  of entries whose seq was here or settled already
in flight  of groups that are held and not decided

Only tokens of attempts that ended are in these books. What a rollout server had generated when it was killed nobody
counts; attempts that were rejected are counted by Redis (`Keys.tokens`, `rejected`) and shown beside the law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from learner.data.batch import Batch
from protocol.ledger import Outcome
from protocol.messages import TrajectoryGroup


class TokenOutcome(StrEnum):
    """Where a token can end."""

    TRAINED = "trained"
    UNTRAINED = "untrained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    DUPLICATE = "duplicate"


TOKEN_OUTCOME = {
    Outcome.FILTERED: TokenOutcome.FILTERED,
    Outcome.STALE: TokenOutcome.STALE,
    Outcome.DEAD: TokenOutcome.FAILED,
}
"""Of seqs that were not trained."""


class ReceivedEntry(NamedTuple):
    """An entry as it came. tokens: sampled for it; counted: those of them that Redis counted when it was published."""

    id: bytes
    tokens: int
    counted: int


class TokenSplit(NamedTuple):
    """Tokens of trained groups, with a gradient and without."""

    trained: int
    masked: int


@dataclass
class TokenAccounting:
    """The books by token. `pending`: by seq, the entries that are not decided. `received_counted`: as Redis counted them."""

    generated: int = 0
    received_counted: int = 0
    totals: dict[TokenOutcome, int] = field(default_factory=lambda: dict.fromkeys(TokenOutcome, 0))
    pending: dict[int, ReceivedEntry] = field(default_factory=dict)

    def receive(self, arrived: ReceivedEntry) -> None:
        """An entry came. What becomes of it follows: `record`, or `mark_pending` now and `record` and `settle` later."""
        self.generated += arrived.tokens
        self.received_counted += arrived.counted

    def mark_pending(self, seq: int, arrived: ReceivedEntry) -> None:
        """Nothing is decided yet."""
        self.pending[seq] = arrived

    def settle(self, seq: int) -> None:
        """What became of `seq` is decided."""
        self.pending.pop(seq, None)

    def record(self, bucket: TokenOutcome, tokens: int) -> None:
        """So many tokens ended there."""
        self.totals[bucket] += tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens of groups that are not decided."""
        return sum(arrived.tokens for arrived in self.pending.values())

    def inconsistency(self) -> str:
        """Where the law is broken, in words; "" when it holds."""
        ended = sum(self.totals.values()) + self.pending_tokens
        if ended == self.generated:
            return ""
        parts = " + ".join(
            f"{tokens} {bucket}" for bucket, tokens in [*self.totals.items(), ("in flight", self.pending_tokens)]
        )
        how = (
            f"{self.generated - ended} are missing" if ended < self.generated else f"{ended - self.generated} too many"
        )
        return f"{self.generated} tokens were generated, but {parts} = {ended}: {how}"

    def values(self) -> dict[str, float]:
        """Numbers for the metrics."""
        named = {f"tokens_law_{bucket}": float(tokens) for bucket, tokens in self.totals.items()}
        return named | {
            "tokens_generated_total": float(self.generated),
            "tokens_law_in_flight": float(self.pending_tokens),
            "tokens_law_closes": float(not self.inconsistency()),
        }

    def to_state(self) -> dict[str, Any]:
        """Plain JSON values of what is decided. What is in flight is not acknowledged: it comes, and counts, again."""
        flying = self.pending.values()
        return {
            "generated": self.generated - sum(arrived.tokens for arrived in flying),
            "received": self.received_counted - sum(arrived.counted for arrived in flying),
            "buckets": {str(bucket): tokens for bucket, tokens in self.totals.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TokenAccounting:
        """Inverse of `to_state`. A checkpoint of a version that kept no such books has {}: they begin there."""
        buckets = {TokenOutcome(name): int(tokens) for name, tokens in state.get("buckets", {}).items()}
        return cls(
            generated=int(state.get("generated", 0)),
            received_counted=int(state.get("received", 0)),
            totals=dict.fromkeys(TokenOutcome, 0) | buckets,
        )


def token_split(batch: Batch, groups: Sequence[TrajectoryGroup], own: int) -> TokenSplit:
    """What of the first `own` of `groups`, from which `batch` was made, is in it and what is not. The rest was mixed
    in: those tokens were booked when they were trained for the first time.
    """
    order = sorted(range(len(groups)), key=lambda i: (groups[i].seq, groups[i].attempt))  # as build_batch numbers them
    pairs = [(i, trajectory) for i in order for trajectory in groups[i].trajectories]
    counts = np.zeros(len(pairs), np.int64)
    for micro_batch in batch.micro_batches:
        counts += np.bincount(micro_batch.trajectory, minlength=len(pairs))
    ours = [(int(counts[n]), int(t.mask.sum())) for n, (i, t) in enumerate(pairs) if i < own]
    return TokenSplit(sum(used for used, _ in ours), sum(sampled - used for used, sampled in ours))
