"""The lease: at most one learner at a time writes to a run. Every state-changing write requires it.

It has two parts. In Redis: the lease and its epoch, which every function compares. On disk: a file per epoch, because
Redis may have lost state or be unreachable, and a learner that was suspended during its successor's whole lifetime must
still find out. A learner that finds a higher epoch than its own in either is fenced permanently.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from pathlib import Path

from learner.delivery.store import LeaseHolder, RunStore
from protocol.errors import Fenced, StateLost, UserError
from protocol.run_meta import another_run_error
from protocol.runtime.files import create_once, durable_mkdir, entries
from protocol.runtime.lifecycle import has_ended, place, process_token
from protocol.runtime.redis.errors import RedisUnavailable

log = logging.getLogger(__name__)

POLL_S = 0.25
ANOTHER_RUN = (
    "give this run another run.id (or use the other run's run.dir to continue it); or start the learner with "
    "--takeover, which fences the other one and deletes its tasks and trajectories in Redis"
)


class LearnerLease:
    """The right to write. `epoch` is 0 until the lease is acquired, and increases at each acquisition.

    ttl_s       the lease expires this long after its last renewal
    epochs_dir  one file per epoch ever used, created exclusively: a Redis that rolled back cannot repeat one
    lineage_id  lineage of the run: Redis refuses the lease for another lineage ("": any)
    """

    def __init__(self, store: RunStore, ttl_s: float, epochs_dir: Path, lineage_id: str = "") -> None:
        self._store, self._ttl_ms, self.epochs_dir = store, int(ttl_s * 1000), epochs_dir
        self.token = f"{process_token()}:{uuid.uuid4().hex[:8]}"
        self.epoch, self.lineage_id = 0, lineage_id

    def acquire(self, floor: int, *, takeover: bool = False) -> int:
        """Acquire the lease and return the new epoch, above `floor`. Waits for a dead predecessor's lease to expire.

        Raises UserError if the holder is alive (it renews the lease), or if the run in Redis has another lineage.
        """
        already_logged, deadline, ended = False, 0.0, ""
        # An epoch below the newest may be free, if its learner died or found a full disk before it claimed it.
        floor = max(floor, max(self._epochs(), default=0))
        while True:
            answer = self._store.acquire(
                self.token, floor, self._ttl_ms, takeover=takeover, lineage_id=self.lineage_id, ended=ended
            )
            if answer is None:
                raise self._of_another_run()
            if isinstance(answer, int):
                if self._claim_epoch(answer):
                    self.epoch = answer
                    self._store.set_owner(answer, self.token)
                    return answer
                floor = max(floor, answer)
                continue
            if has_ended(answer.token):
                log.warning("taking over from %s, which has ended", describe(answer))
                ended = answer.token  # of this holder only: another one may be faster
                continue
            if not already_logged:
                already_logged, deadline = True, time.monotonic() + answer.ttl_s + 1.0
                log.warning(
                    "the run is held by %s; waiting up to %.0f s for its lease to expire",
                    describe(answer),
                    answer.ttl_s,
                )
            if time.monotonic() > deadline:
                raise UserError(
                    f"run {self._store.keys.run} is held by {describe(answer)}, which is alive",
                    why="two learners must not train one run: each would undo the other's work",
                    todo=f"stop it ({_how_to_stop(answer)}), or start this one with --takeover, which fences the other",
                )
            time.sleep(POLL_S)

    def _of_another_run(self) -> UserError:
        store, ours = self._store, f"lineage {self.lineage_id[:8]}"
        return another_run_error(store.meta(), run=store.keys.run, redis=store.url, ours=ours, todo=ANOTHER_RUN)

    def _claim_epoch(self, epoch: int) -> bool:
        """Claim the epoch durably on disk, so that no Redis can assign it again. Return whether it succeeded."""
        durable_mkdir(self.epochs_dir)
        return create_once(self.epochs_dir / f"e{epoch}", self.token + "\n")

    def renew(self) -> None:
        """Extend the lease. Raises Fenced if this learner no longer holds it, RedisUnavailable if unknown."""
        if not self._store.renew(self._ttl_ms):
            raise Fenced("the lease of this learner expired or was taken")

    def superseded_by(self) -> LeaseHolder | None:
        """Return the other learner that holds the lease or began a higher epoch since; None if there is none."""
        holder = self._store.holder()
        return holder if holder and holder.token != self.token else self._successor()

    def reacquire(self) -> bool:
        """Renew the lease, or acquire it again if it expired and no other learner took it; then return True.

        Raises Fenced if another learner has begun meanwhile, RedisUnavailable.
        """
        if (other := self.superseded_by()) is not None:
            raise self.fenced_by(other)
        try:
            self.renew()
            return False
        except Fenced:
            try:
                self.acquire(self.epoch)
            except UserError:  # another live learner was faster
                if (other := self.superseded_by()) is not None:
                    raise self.fenced_by(other) from None
                raise
            return True

    def replaced(self) -> Fenced | None:
        """Return the error of a replaced learner if another one has begun; without Redis, the epoch files decide.

        None if they cannot be read (no file descriptor, a failing disk): the error that ends this learner is reported.
        """
        try:
            try:
                other = self.superseded_by()
            except (RedisUnavailable, StateLost):
                other = self._successor()
        except OSError as error:
            log.warning("cannot check whether another learner took over: %s", error)
            return None
        return None if other is None else self.fenced_by(other)

    def fenced_by(self, other: LeaseHolder) -> Fenced:
        """Return the error of a replaced learner, with the new holder and the time."""
        return Fenced(f"this learner (epoch {self.epoch}, process {os.getpid()}) was replaced by {describe(other)}")

    def confirm(self) -> None:
        """Raise Fenced unless this learner may commit the run's state on disk.

        While Redis is unavailable, the epoch files decide: a successor would have created a higher one.
        """
        if (other := self._successor()) is not None:
            raise self.fenced_by(other)
        try:
            self.renew()
        except RedisUnavailable as error:
            log.warning("committing without Redis: no later epoch exists on disk (%s)", error)

    def _successor(self) -> LeaseHolder | None:
        """Return the newest epoch on disk and its holder, if it is higher than ours."""
        epochs = self._epochs()
        newest = max(epochs, default=0)
        if newest <= self.epoch:
            return None
        path = epochs[newest]
        return LeaseHolder(newest, path.read_text().strip(), 0.0, since=path.stat().st_mtime)

    def _epochs(self) -> dict[int, Path]:
        """Return the epochs on disk and their files."""
        return {int(p.name[1:]): p for p in entries(self.epochs_dir, "e*") if p.name[1:].isdigit()}

    def release(self) -> None:
        """Free the lease, so that a successor does not wait."""
        try:
            self._store.release()
        except (RedisUnavailable, StateLost, UserError) as error:
            log.warning("could not release the lease; it will expire: %s", error)


def describe(holder: LeaseHolder) -> str:
    """Return a holder as text: epoch, process, host, acquisition and last renewal."""
    parts = holder.token.split(":")
    who = f"process {parts[1]} on {parts[0].split('/')[0]}" if len(parts) > 1 else holder.token or "an unknown process"
    text = f"epoch {holder.epoch}, {who}"
    if holder.since:
        text += f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(holder.since))} UTC"
    return text if holder.renewed_s is None else f"{text}, renewed {holder.renewed_s:.1f} s ago"


def _how_to_stop(holder: LeaseHolder) -> str:
    parts = holder.token.split(":")
    if len(parts) < 2 or not parts[1].isdigit():
        return "SIGTERM: it writes a checkpoint"
    where = "" if parts[0] == place() else f" on {parts[0].split('/')[0]}"
    return f"kill {parts[1]}{where}: it writes a checkpoint first"
