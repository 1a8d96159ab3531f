"""Run identity: the lineage id on disk, and whether Redis' state under this run id belongs to the same run.

The id is random, generated once per run directory, and never changed. A run id is only a name: a directory that was
removed or copied, or another user's configuration, may reuse one that Redis knows. The learner would then adopt foreign
`issued`, tasks and trajectories, and fence the other learner. So a learner compares before it writes.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Mapping

from learner.checkpoint.checkpoint import Checkpoints
from learner.delivery.issue_limit import IssueReservation
from learner.delivery.lease import ANOTHER_RUN, describe
from learner.delivery.store import RunStore
from protocol.errors import UserError
from protocol.run_meta import LINEAGE_FILE, another_run_error, lineage_id_in, lineage_id_of, text_of
from protocol.runtime.files import create_once, durable_mkdir
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


def ensure_lineage_id(run: RunSettings) -> str:
    """Return the lineage id of the run directory, generated at the first call. Only the learner and the launcher call
    this: other processes may see another disk.

    Raises UserError if the current checkpoint belongs to another lineage.
    """
    path = run.dir / LINEAGE_FILE
    committed = Checkpoints(run.checkpoint_dir, 1).lineage_id()
    durable_mkdir(run.dir)
    create_once(path, (committed or uuid.uuid4().hex) + "\n", mode=0o600)
    try:
        found = lineage_id_in(path.read_text())
        why = "" if found else "it does not contain 32 hex digits"
    except (OSError, ValueError) as error:
        found, why = "", str(error)
    if not found:
        raise UserError(
            f"cannot read the run's lineage id: {path}",
            why=why,
            todo="restore the file" + (f": according to the checkpoint it contained {committed}" if committed else ""),
        )
    if committed and committed != found:
        raise UserError(
            f"the checkpoint in {run.checkpoint_dir} has lineage {committed[:8]}, the run directory {found[:8]}",
            why=f"it was copied from another run; resuming would mix seqs, ledgers and weights of two runs ({path})",
            todo="for a new run from its weights: `foray export` the copied run, and set run.model to the result with "
            "an "
            f"empty run.dir; to continue the copied run here, write its id into the file: {committed}",
        )
    if committed == "":
        log.info("the checkpoint is from a version without lineage ids; assigning it to lineage %s", found[:8])
    return found


def foreign_run_error(
    store: RunStore, run: RunSettings, lineage_id: str, reserved: IssueReservation
) -> UserError | None:
    """Return an error if Redis' state under this run id belongs to another run; else None.

    Read-only. Raises RedisUnavailable.
    """
    raw, issued = store.meta(), store.issued()
    theirs, most = lineage_id_of(raw), reserved.highest()  # Redis first: a learner writes the file before it issues
    if theirs != lineage_id:
        if theirs or ((raw or issued) and not reserved.has_epochs()):
            return _foreign(store, run, lineage_id, raw, issued)
        if raw or issued:
            log.info("Redis' state is from a version without lineage ids; assigning it to lineage %s", lineage_id[:8])
        if most is None:
            return None
    elif (place := text_of(raw).get("dir")) not in (None, str(run.dir.absolute())):
        log.info("the learner of this run moved from %s to %s", place, run.dir.absolute())
    if issued > (most or 0):
        return UserError(
            f"Redis at {store.url} has issued tasks of run {run.id} up to seq {issued}, but {run.dir} has issued none "
            f"above {most or 0}",
            why="Redis contains tasks of another run directory, or its counter was changed; this run would use tasks "
            "that it did not issue",
            todo="start the learner with --takeover: it deletes the run's tasks and trajectories in Redis and resumes "
            "from its own checkpoint; or set another run.id",
        )
    return None


def take_over(
    store: RunStore, run: RunSettings, lineage_id: str, reserved: IssueReservation, meta: Mapping[str, str]
) -> UserError | None:
    """Delete another lineage's run in Redis, fenced by our lease, and claim it; return what it was.

    Raises RedisUnavailable, StateLost or Fenced, and may be retried.
    """
    found = foreign_run_error(store, run, lineage_id, reserved)
    if found is not None:
        store.reset(meta)
        log.warning("--takeover: deleted the run's state in Redis: %s", found)
    return found


def location_facts(run: RunSettings) -> dict[str, str]:
    """Return the location of a run's learner, for the messages above."""
    return {"host": socket.gethostname(), "dir": str(run.dir.absolute()), "model": str(run.model)}


def _foreign(store: RunStore, run: RunSettings, lineage_id: str, raw: Mapping[bytes, bytes], issued: int) -> UserError:
    target, holder = store.announced(), store.holder()
    more = [f"step {target.step}"] if target else []
    more += [f"tasks up to seq {issued}"] if issued else []
    more += [f"held by {describe(holder)}"] if holder and holder.epoch != store.epoch else []
    return another_run_error(
        raw,
        run=run.id,
        redis=store.url,
        ours=f"{run.dir.absolute()}, lineage {lineage_id[:8]}",
        more=", ".join(more),
        todo=ANOTHER_RUN,
    )
