"""What the learner says of itself: the numbers of each second, the sum at the end, and what all others must share."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from learner.audit import Audit
from learner.books import Books
from learner.history import LEARNER_ID
from learner.identity import place_facts
from learner.lease import Lease
from learner.metrics import Meter
from learner.sampler import Sampler
from protocol.ledger import Outcome
from protocol.messages import MetricsSnapshot
from protocol.meta import RunMeta, tokenizer_digest
from protocol.settings import RunSettings

SHARED = ("group_size", "groups_per_step", "max_lag", "steps", "temperature", "top_p", "top_k", "seed")
"""Settings of the run that every process must have alike."""


def measure(run: RunSettings, books: Books, lease: Lease, meter: Meter, audit: Audit) -> Callable[[], MetricsSnapshot]:
    """What makes the present snapshot; thread-safe."""

    def snapshot() -> MetricsSnapshot:
        with books.lock:
            counts, tally = books.ledger.counts, books.tally
            values = {
                **{str(outcome): counts[outcome] for outcome in Outcome},
                "step": books.step,
                "steps": run.steps,
                "epoch": lease.epoch,
                "groups_trained": counts[Outcome.TRAINED],
                "tokens_trained": tally.tokens_trained,
                "tokens_sampled": tally.tokens_sampled,
                "issued": books.issued,
                "settled": books.ledger.settled,
                "watermark": books.ledger.watermark,
                "in_flight": books.ledger.open(books.issued),
                "held": len(books.held),
                "duplicates": tally.duplicates,
                "redelivered": tally.redelivered,
                "reissued": tally.reissued,
                "dead_letters": tally.dead_letters,
                "poisoned": tally.poisoned,
                "requeued": tally.requeued,
                "skipped_steps": tally.skipped_steps,
                "state_lost": tally.state_lost,
                "lease_lapsed": tally.lease_lapsed,
                **audit.values(),
                **books.filtered(),
            }
        return meter.snapshot(LEARNER_ID, **values)

    return snapshot


def summary(books: Books) -> str:
    """Both laws in one line, at the end of a run."""
    counts = ", ".join(f"{books.ledger.counts[outcome]} {outcome}" for outcome in Outcome)
    tokens = ", ".join(f"{number} {bucket}" for bucket, number in books.law.buckets.items())
    return (
        f"{books.issued} seqs issued = {counts}, 0 in flight; {books.tally.duplicates} duplicates suppressed; "
        f"{books.law.generated} tokens generated = {tokens}"
    )


def meta_of(run: RunSettings, sampler: Sampler, lineage_id: str) -> RunMeta:
    """What every other process of the run must agree with."""
    try:
        tokenizer = tokenizer_digest((run.model / "tokenizer.json").read_bytes())
    except OSError:  # a model without a tokenizer of its own: nobody can disagree
        tokenizer = ""
    facts = {name: str(getattr(run, name)) for name in SHARED} | {"run": run.id, "foray": version("foray")}
    facts |= place_facts(run) | {"questions": sampler.questions.fingerprint[:16]}
    return RunMeta(tokenizer=tokenizer, facts=facts, lineage_id=lineage_id)
