"""What the learner says of itself: the numbers of each second, the sum at the end, and what all others must share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

import numpy as np

from learner.audit import Audit
from learner.books import Books
from learner.history import LEARNER_ID
from learner.identity import place_facts
from learner.lease import Lease
from learner.metrics import Meter
from learner.sampler import Sampler
from protocol.ledger import Outcome
from protocol.messages import MetricsSnapshot, Owner, Status, Trajectory, TrajectoryGroup
from protocol.meta import RunMeta, tokenizer_digest
from protocol.settings import RunSettings
from protocol.staleness import lag

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


def group_metrics(groups: Sequence[TrajectoryGroup], now_step: int) -> dict[str, float]:
    """What the rollouts of a step were like, from all its groups: before they are packed, or cut over the ranks.

    now_step  of the policy that is trained on them, before its update

    Means are over all trajectories, those of rewards over the ones that vote. What these groups do not have (a reward
    of some name, a token of the policy) is left out, and never 0; without a trajectory there is nothing at all.
    """
    everyone = [t for g in groups for t in g.trajectories]
    if not everyone:
        return {}
    voting = [t for t in everyone if t.status.votes]
    values = {f"status/{status}": _mean([t.status is status for t in everyone]) for status in Status}
    for name, of_each in {
        "response_length": [t.num_sampled for t in everyone],
        "trajectory_length": [sum(len(s.ids) for s in t.segments) for t in everyone],
        "turns": [t.turns for t in everyone],
        "searches": [t.searches for t in everyone],
        "group_lag": group_lags(groups, now_step),
    }.items():
        if of_each:  # a group without a sampled token has no lag
            values |= {f"{name}_mean": _mean(of_each), f"{name}_max": float(max(of_each))}
    values["tool_errors_mean"] = _mean([sum(bool(s.error) for s in t.segments) for t in everyone])
    values["invalid_actions_mean"] = _mean([_invalid_actions(t) for t in everyone])
    if voting:
        rewards = [t.reward for t in voting]
        values |= {"reward_mean": _mean(rewards), "reward_std": float(np.std(np.asarray(rewards, np.float64)))}
    for part in sorted({name for t in voting for name in t.rewards}):
        values[f"reward/{part}"] = _mean([t.rewards[part] for t in voting if part in t.rewards])
    return values


def group_lags(groups: Sequence[TrajectoryGroup], now_step: int) -> list[int]:
    """Steps between the oldest version in each group and `now_step`; a group without a sampled token has none."""
    return [lag(now_step, first) for g in groups if (first := g.first_version()) is not None]


def token_lags(groups: Sequence[TrajectoryGroup], now_step: int) -> dict[int, int]:
    """Lag in steps -> tokens of the policy with that lag."""
    found: Counter[int] = Counter()
    for span in (span for g in groups for t in g.trajectories for s in t.segments for span in s.spans):
        found[lag(now_step, span.version)] += span.end - span.start
    return dict(found)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(np.asarray(list(values), np.float64)))


def _invalid_actions(trajectory: Trajectory) -> int:
    """Turns that asked for nothing the environment knows: its answer is about no query and no tool."""
    return sum(s.owner is Owner.ENVIRONMENT and not s.query and not s.tool for s in trajectory.segments)


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
