"""Which run this is: its lineage id on disk, and whether what Redis holds under its run id is the same run's.

The id is random, made once for a run directory and never changed. A run id is only a name: a directory that was
removed or copied, or another person's configuration, may use one that Redis already knows. Its `issued`, tasks and
trajectories would then be taken for ours, and its learner would be fenced. So a learner compares before it writes.
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
    """Return the lineage id of the run directory, made at the first call. Only the learner and the launcher call it:
    other processes may see another disk.

    Raises UserError when the checkpoint in force belongs to another lineage.
    """
    path = run.dir / LINEAGE_FILE
    committed = Checkpoints(run.checkpoint_dir, 1).lineage_id()
    durable_mkdir(run.dir)
    create_once(path, (committed or uuid.uuid4().hex) + "\n", mode=0o600)
    try:
        found = lineage_id_in(path.read_text())
        why = "" if found else "it does not hold 32 hex digits"
    except (OSError, ValueError) as error:
        found, why = "", str(error)
    if not found:
        raise UserError(
            f"the lineage id of the run cannot be read: {path}",
            why=why,
            todo="restore the file" + (f": it held {committed}, by the checkpoint" if committed else ""),
        )
    if committed and committed != found:
        raise UserError(
            f"the checkpoint in {run.checkpoint_dir} is of lineage {committed[:8]}, the run directory of {found[:8]}",
            why=f"it was copied from another run: seqs, ledgers and weights of two runs would mix ({path})",
            todo="for a new run from its weights: `foray export` the copied run, and give the result as run.model with "
            f"an empty run.dir; to go on with the copied run here, write its id into the file: {committed}",
        )
    if committed == "":
        log.info("the checkpoint was written before there were lineage ids; it is adopted by lineage %s", found[:8])
    return found


def foreign_run_error(
    store: RunStore, run: RunSettings, lineage_id: str, reserved: IssueReservation
) -> UserError | None:
    """Why what Redis holds under this run id is not this run's; None when it is, or when there is nothing.

    Only reads. Raises RedisUnavailable.
    """
    raw, issued = store.meta(), store.issued()
    theirs, most = lineage_id_of(raw), reserved.highest()  # Redis first: a learner writes the file before it issues
    if theirs != lineage_id:
        if theirs or ((raw or issued) and not reserved.has_epochs()):
            return _foreign(store, run, lineage_id, raw, issued)
        if raw or issued:
            log.info("Redis holds this run from before there were lineage ids; adopted by lineage %s", lineage_id[:8])
        if most is None:
            return None
    elif (place := text_of(raw).get("dir")) not in (None, str(run.dir.absolute())):
        log.info("the learner of this run was in %s before, and is in %s now", place, run.dir.absolute())
    if issued > (most or 0):
        return UserError(
            f"Redis at {store.url} says that run {run.id} has issued tasks up to seq {issued}, and {run.dir} says that "
            f"it has issued none above {most or 0}",
            why="Redis holds what another directory of this run did, or somebody has changed the count: its tasks "
            "would be taken for ours",
            todo="start the learner with --takeover: it deletes the run's tasks and trajectories in Redis and goes on "
            "from its own checkpoint; or give this run another run.id",
        )
    return None


def take_over(
    store: RunStore, run: RunSettings, lineage_id: str, reserved: IssueReservation, meta: Mapping[str, str]
) -> UserError | None:
    """Empties a run of another lineage in Redis, fenced by our lease, and makes it ours; returns what it was.

    Raises RedisUnavailable, StateLost or Fenced, and may be called again.
    """
    found = foreign_run_error(store, run, lineage_id, reserved)
    if found is not None:
        store.reset(meta)
        log.warning("--takeover: what Redis held was deleted: %s", found)
    return found


def location_facts(run: RunSettings) -> dict[str, str]:
    """Return where the learner of a run is, for the messages above."""
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
