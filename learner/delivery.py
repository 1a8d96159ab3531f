"""Everything of the learner that tasks and groups go through, put together."""

from __future__ import annotations

from dataclasses import dataclass

from learner.audit import Audit
from learner.books import Books
from learner.checkpoint import Checkpoint
from learner.config import LearnerSettings
from learner.crosscheck import CrossCheck
from learner.evidence import Evidence
from learner.filtering import GroupFilter
from learner.history import History
from learner.issue import Issuer
from learner.keeper import Keeper
from learner.lease import Lease
from learner.measuring import measure, meta_of
from learner.metrics import Meter
from learner.reconcile import Reconciler
from learner.redis_client import RunStore
from learner.requests import Requests
from learner.reserved import Reserved
from learner.sampler import Sampler
from learner.source import Source
from protocol.settings import RunSettings


@dataclass(frozen=True)
class Delivery:
    """See each of them."""

    history: History
    group_filter: GroupFilter
    source: Source
    issuer: Issuer
    audit: Audit
    keeper: Keeper


def build_delivery(
    run: RunSettings,
    settings: LearnerSettings,
    sampler: Sampler,
    store: RunStore,
    lease: Lease,
    books: Books,
    meter: Meter,
    checkpoint: Checkpoint | None,
) -> Delivery:
    """From books that have been restored. checkpoint: the one they are from."""
    history, reserved = History(store), Reserved(lease.epochs_dir)
    group_filter = GroupFilter(settings.filtering, run.groups_per_step)
    source = Source(
        store,
        books,
        run.id,
        group_filter,
        room=settings.prefetch_steps * run.groups_per_step,
        max_attempts=settings.max_attempts,
        evidence=Evidence(store, run.dir / "dead_letters.jsonl"),
        history=history,
    )
    issuer, requests = Issuer(store, books, sampler, run, reserved, history), Requests(store, books, history)
    state, name = (checkpoint.facts.get("redis"), checkpoint.path.name) if checkpoint else (None, "")
    cross = CrossCheck(store, books, history, state=state, checkpoint=name)
    audit = Audit(store, books, history, requests, cross, meta_of(run, sampler, lease.lineage_id))
    keeper = Keeper(
        store,
        lease,
        issuer,
        Reconciler(store, books, source, history),
        requests,
        cross,
        meter,
        measure(run, books, lease, meter, audit),
        lease_s=settings.lease_s,
        reconcile_s=settings.reconcile_s,
    )
    return Delivery(history, group_filter, source, issuer, audit, keeper)
