"""The accounting of a finished run, as its files have it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from protocol.ledger import Ledger


def require_balanced(directory: Path, steps: int, groups: int) -> tuple[dict[str, int], int]:
    """Return the outcomes and how often the learner started. Every seq has one outcome, each group was trained once."""
    checkpoint = Checkpoints(directory / "checkpoints", 2).load()
    assert checkpoint is not None and checkpoint.facts["step"] == steps
    ledger = Ledger.from_state(checkpoint.facts["ledger"])
    counts = {str(outcome): number for outcome, number in ledger.counts.items()}
    assert counts["trained"] == steps * groups and not ledger.above and ledger.watermark == sum(counts.values())
    times = Counter(entry.group.seq for entry in read_journal(directory / "journal", lineage=checkpoint.lineage))
    assert max(times.values()) == 1 and len(times) == steps * groups, "0 twice, 0 missing"
    return counts, len(checkpoint.lineage)
