"""Whether what Redis holds under run.id is the run in run.dir: asked as a learner does, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from learner.delivery.identity import foreign_run_error
from learner.delivery.issue_limit import IssueReservation
from learner.delivery.store import RunStore
from protocol.errors import ForayError
from protocol.run_meta import LINEAGE_FILE, lineage_id_in

CHECK = "run.id"
NEW = "new"
"""Stands for the lineage id that a learner would make: Redis cannot know it yet."""


def lineage(url: str, config: RunConfig) -> Iterator[Finding]:
    """Yield a finding where another run has the name, one that is ok where none has."""
    run = config.run.model_copy(update={"redis_url": url})
    try:
        ours = lineage_id_in((run.dir / LINEAGE_FILE).read_text()) or NEW
    except (OSError, ValueError):
        ours = NEW
    store = RunStore(url, run.id)
    try:
        refusal = foreign_run_error(store, run, ours, IssueReservation(run.checkpoint_dir / "epochs"))
    except (ForayError, OSError):
        return  # whether Redis answers, and whom, is said elsewhere
    finally:
        store.close()
    if refusal is None:
        yield Finding(CHECK, "ok", f"no other run is called {run.id} there")
    else:
        yield Finding.of(CHECK, refusal)
