"""Check, as a learner does and without writing, that the run in Redis with this run.id is the run in run.dir, and that
its checkpoint can be resumed with these settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.launcher.addresses import anchored
from deploy.launcher.run_dir import RESOLVED, read_configuration
from learner.checkpoint.checkpoint import Checkpoints
from learner.data.questions import load_questions
from learner.data.sampler import Sampler
from learner.delivery.identity import foreign_run_error, require_resumable
from learner.delivery.issue_limit import IssueReservation
from learner.delivery.store import RunStore
from protocol.errors import ForayError, UserError
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


CHOSEN = {
    "run.steps",
    "run.date",
    "run.redis_url",
    "rollout.search.urls",
    "retriever.port",
    "launch.redis",
    "launch.retrievers",
}
"""Settings that each start may choose, or that users raise to go on."""


def resume(config: RunConfig) -> Iterator[Finding]:
    """Yield a failure if the checkpoint in run.dir cannot be resumed, and name the settings that have changed."""
    try:
        facts = Checkpoints(config.run.checkpoint_dir, 1).manifest()
        if facts is not None:
            sampler = Sampler(load_questions(config.learner.questions), config.run.seed)
            require_resumable(facts, str(config.run.checkpoint_dir), config.run, config.learner, sampler.fingerprint)
    except OSError:
        return  # other checks report a run.dir that cannot be used
    except UserError as error:
        yield Finding.of("resume", error)
        return
    try:
        before = read_configuration(config.run.dir / RESOLVED, config.run.dir)
    except UserError:
        return  # the first start, or a damaged file, which is written anew
    if changed := list(_changes(before, anchored(config).model_dump(mode="json"))):
        fix = "nothing, if you changed them: they are used from now on"
        yield Finding("settings", "warn", f"changed since the last start: {', '.join(changed)}", fix)


def _changes(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield `name before -> now` for the values that differ; names that only one of the two knows are left out."""
    if name in CHOSEN:
        return
    if isinstance(before, dict) and isinstance(now, dict) and before.get("type") == now.get("type"):
        for key in (key for key in before if key in now):
            yield from _changes(before[key], now[key], f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} {before} -> {now}"
