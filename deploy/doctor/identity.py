"""Check that the run in Redis with this run.id is the run in run.dir, as a learner does, without writing."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from learner.delivery.identity import foreign_run_error
from learner.delivery.issue_limit import IssueReservation
from learner.delivery.store import RunStore
from protocol.errors import ForayError
from protocol.runtime.files import lineage_of

CHECK = "run.id"
NEW = "new"
"""Placeholder for the lineage id that a learner would create: Redis cannot contain it yet."""


def lineage(url: str, config: RunConfig) -> Iterator[Finding]:
    """Yield a failure if another run has this id, else an ok."""
    run = config.run.model_copy(update={"redis_url": url})
    ours = lineage_of(run.dir) or NEW
    store = RunStore(url, run.id)
    try:
        refusal = foreign_run_error(store, run, ours, IssueReservation(run.checkpoint_dir / "epochs"))
    except (ForayError, OSError):
        return  # other checks report whether Redis answers this user
    finally:
        store.close()
    if refusal is None:
        yield Finding(CHECK, "ok", f"no other run in this Redis has the id {run.id}")
    else:
        yield Finding.of(CHECK, refusal)
