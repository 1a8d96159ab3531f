"""Broadcast weights over a process group of the learner (rank 0) and the engines, in flattened buckets.

Files are used for the first version of an epoch, for a version for which no engine is ready, and after a failed
transfer (counted, and logged with its reason). An engine that is in no view gets files of a version that was sent
(`snapshots.py`). For these, and for a failed transfer, the learner keeps a copy of the weights in main memory: as many
bytes as the model has, plus one bucket while the copy is renewed. An engine whose host does not have the files is in
the next view, or gets the announced version again while training waits for data (`send_again`).

With backend `nccl` the tensors stay on the learner's GPU: as many buckets as it has room for are gathered before the
members pause, each is sent from there, and another stream copies it to main memory meanwhile (`cuda.py`; the tests run
everything else with `tests.support.lazy_group`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from learner.config.learner import DistributedPublishSettings
from learner.weights.base import Announcement, EngineLink, PackingError
from learner.weights.buckets import Named, PackedBucket, layout, num_bytes, pack, plan
from learner.weights.checksums import SourceChecksums
from learner.weights.disk import DiskPublisher, read_tensor
from learner.weights.membership import SIMPLE, Membership, Proof, member_of
from learner.weights.process_group import GroupSender, Rendezvous, is_lazy
from learner.weights.snapshots import SnapshotWriter
from learner.weights.staging import KeptBucket, staging_for
from learner.weights.transfer import Transfer, TransferFailed, TransferLimits
from protocol.codec import encode
from protocol.messages import EngineInfo, WeightUpdate, WeightView
from protocol.runtime.http.auth import is_loopback, read_access
from protocol.runtime.http.server import service_host
from protocol.runtime.net import free_port
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from protocol.weights import WeightBucket, WeightPlan

log = logging.getLogger(__name__)

Check = Callable[[PackedBucket], None]
PIECES, SMALLEST_BUCKET = 8, 8 << 20
"""Smaller models than eight buckets use smaller buckets, so that sending and gathering overlap; each call has a
cost."""


COMMITTED = 16
"""Committed views that are named in the next ones."""


class DistributedPublisher:
    """Sends versions over a process group, or writes files as `DiskPublisher` does where needed."""

    def __init__(
        self, settings: DistributedPublishSettings, run: RunSettings, model_files: Sequence[Path], link: EngineLink
    ) -> None:
        self._run, self._settings, self._link = run.id, settings, link
        self._disk = DiskPublisher(settings, run, model_files, link)
        self._announcement = Announcement(link)
        self._plan: tuple[WeightBucket, ...] = ()
        self._encoded_plan = b""
        self._staging = staging_for(settings.backend)
        self._membership = Membership(link, settings.backend, patience_s=settings.patience_s)
        self._proof = Proof()
        self._access = read_access(os.environ)
        self._address = service_host(settings.address, run.redis_url, self._access, "learner.publish.address")
        self._sender: GroupSender | None = None
        self._closing: list[GroupSender] = []
        """Senders whose threads are still running."""
        self._group: tuple[str, ...] = ()
        """Members of the group that `_sender` leads."""
        self._transfer: Transfer | None = None
        """A verified transfer that waits for its announcement."""
        self._epoch, self._number = 0, 0
        self._committed: deque[int] = deque(maxlen=COMMITTED)
        """Numbers of the epoch's last committed views."""
        self._hashing = ThreadPoolExecutor(1, "hash weights")
        self._counts = dict.fromkeys(("publish_distributed", "publish_disk", "publish_fallbacks", "publish_again"), 0)
        self._last: dict[str, float] = {}
        self._limits = TransferLimits(settings)
        self._copy: tuple[PolicyVersion, list[KeptBucket]] | None = None
        self._copy_lock, self._writing = threading.Lock(), threading.Lock()
        self._snapshots = SnapshotWriter(link, self._announcement, self._snapshot, patience_s=settings.patience_s)

    # --- the interface ---

    @property
    def device(self) -> str:
        """Return the device to send from: NCCL sends from GPUs only, gloo from main memory."""
        return "cuda" if self._settings.backend == "nccl" else "cpu"

    def publish(self, version: PolicyVersion, weights: Iterable[Named]) -> WeightUpdate:
        """Send `version` to the ready engines, or write it as files. Raises BadWeights, OSError, Fenced."""
        named = self._proof.noting(weights)
        self._last = {}
        members, why = self._members(version)
        if not members:
            return self._publish_by_disk(version, named, why)
        copy: list[KeptBucket] = []
        inspection, sums = self._disk.sanity.inspection(deferred=self._staging.deferred), self._sums(members)
        packed = pack(self._plan, named, inspection, sums.add if sums else None)
        packed = self._keep_copy(_checked(packed, self._check(members, sums)), copy)
        transfer = self._begin(version, members, sums)
        try:
            self._run_transfer(transfer, packed)
        except (TransferFailed, PackingError, RedisUnavailable) as error:
            self._failed(transfer, error)
            log.warning("publishing %s as files: %s", version.label, error)
            self._counts["publish_fallbacks"] += 1
            try:
                return self._fall_back(version, packed, copy, sums, error)
            except PackingError as wrong:
                if isinstance(weights, Iterator):
                    raise
                log.error("gathering %s again: %s", version.label, wrong)
                for _ in named:  # gathering is collective and must be completed
                    pass
                return self._write(version, weights)
        except BaseException:
            self._failed(transfer, None)
            raise
        self._disk.sanity.published(version, inspection)
        return self._sent(version, transfer, copy)

    def send_again(self, weights: Iterable[Named]) -> None:
        """Send the announced version to the engines that need a broadcast, in a group of their own."""
        last = self._announcement.update
        try:
            members = self._membership.of_again(last) if last is not None and self._plan else []
        except RedisUnavailable as error:
            log.info("cannot look for engines that wait for a broadcast: %s", error)
            return
        if last is None or not members:
            return
        named, inspection = iter(weights), self._disk.sanity.inspection(deferred=self._staging.deferred)
        sums = self._sums(members)
        packed = pack(self._plan, named, inspection, sums.add if sums else None)
        packed = _checked(packed, self._check(members, sums))
        transfer = self._begin(last.version, members, sums)
        try:
            self._run_transfer(transfer, packed)
            transfer.commit()
            self._committed.append(transfer.view.number)
        except (TransferFailed, PackingError, RedisUnavailable) as error:
            self._failed(transfer, error)
            log.warning("could not send %s again: %s", last.version.label, error)
            deque(named, maxlen=0)  # gathering is collective and must be completed
            return
        except BaseException:
            self._failed(transfer, None)
            raise
        self._membership.succeeded()
        self._counts["publish_again"] += 1
        log.info("sent %s again, to %s", last.version.label, ", ".join(e.id for e in members))

    def initial(self, version: PolicyVersion, weights: Iterable[Named]) -> WeightUpdate | None:
        """Announce `run.model` as `DiskPublisher` does; the next version can then be broadcast."""
        named = list(weights)
        update = self._disk.initial(version, named)
        if update is not None:
            self._set_plan(named)
            self._note_stored(Path(update.path), named)
        return update

    def _note_stored(self, model: Path, named: Sequence[Named]) -> None:
        """Note the tensor that a new group is proven with: engines hold it, as `model` does."""
        simple = [(name, tensor) for name, tensor in named if name.endswith(SIMPLE)]
        if simple and is_lazy(self._settings.backend):
            name, like = min(simple, key=lambda one: one[1].numel())
            deque(self._proof.noting([(name, read_tensor(model, name, like.dtype))]), maxlen=0)

    def announce(self, update: WeightUpdate, state: str) -> None:
        """Commit a transfer. At the end of the run the last version is first written as files."""
        began = time.monotonic()
        if state == "done" and not update.path and (written := self._snapshot(update)) is not None:
            update = written
        self._announcement.set(update, state)
        self._proof.published(update.version)
        transfer, self._transfer = self._transfer, None
        if transfer is not None and transfer.view.version == update.version:
            self._committed.append(transfer.view.number)  # by the target: its phase may not reach Redis
            transfer.commit()
            self._last["publish_commit_s"] = time.monotonic() - began

    def collect(self, in_use: Collection[PolicyVersion]) -> None:
        """Remove old directories."""
        self._disk.collect(in_use)

    def facts(self) -> Mapping[str, float]:
        """Return seconds per phase and bytes of the last version, and counters of transports since the start."""
        return {**self._counts, "publish_snapshots": self._snapshots.written, **self._last}

    def close(self) -> None:
        """Stop the thread and close the group."""
        self._snapshots.close()
        self._hashing.shutdown()
        self._staging.close()
        self._close_group()
        for sender in self._closing:
            sender.join()

    # --- a version over the group ---

    def _members(self, version: PolicyVersion) -> tuple[list[EngineInfo], str]:
        """Return the receiving engines in the order of their ranks; or [] and the reason."""
        last = self._announcement.update
        if last is None or last.epoch != version.epoch or not self._plan:
            return [], "first version of an epoch"
        return self._membership.of_next(last)

    def _sums(self, members: Sequence[EngineInfo]) -> SourceChecksums | None:
        # hashing waits for every tensor: on a GPU the inspection compares each with its bucket instead
        if self._staging.deferred:
            return None
        return SourceChecksums(self._hashing, (_dtype(e) for e in members), self._checksum(members))

    def _checksum(self, members: Sequence[EngineInfo]) -> str:
        """Return the algorithm for a view of `members`: the chosen one, if they are authenticated and all know it."""
        chosen = self._settings.checksum
        authenticated = is_loopback(self._address) or "node" in self._access.tokens
        return chosen if authenticated and all(chosen in e.checksums for e in members) else "sha256"

    def _check(self, members: Sequence[EngineInfo], sums: SourceChecksums | None) -> Check | None:
        blind = any(not _dtype(engine) for engine in members)
        return sums.check if sums and blind else None

    def _run_transfer(self, transfer: Transfer, packed: Iterator[PackedBucket]) -> None:
        limits, room = self._limits, self._staging.room()
        transfer_s = limits.transfer_s(len(self._plan))
        transfer.run(packed, prepare_s=limits.join_s, transfer_s=transfer_s, stall_s=limits.stall_s, room=room)
        limits.note(transfer)

    def _begin(self, version: PolicyVersion, engines: list[EngineInfo], sums: SourceChecksums | None) -> Transfer:
        members = tuple(member_of(e) for e in engines)
        if self._epoch != version.epoch:
            self._epoch, self._number = version.epoch, 0
            self._committed.clear()
        self._number += 1
        offsets = [1]
        for engine in engines:
            offsets.append(offsets[-1] + engine.ranks)
        proof = None
        if self._sender is None or self._group != members:
            self._close_group()
            proof = self._proof.of(engines) if is_lazy(self._settings.backend) else None
            # a stranger would need the random part to find the others in the rendezvous
            name = f"{self._run}-{version.epoch}-{self._number}-{secrets.token_hex(8)}"
            self._sender = GroupSender(self._rendezvous(name, offsets[-1]), proof.flat if proof else None)
            self._group = members
            if blind := [e.id for e in engines if not _dtype(e)]:
                log.info(
                    "checksums of %s can be compared only with engines of their layout, not with the policy",
                    ", ".join(blind),
                )
        rendezvous, checksum = self._sender.rendezvous, self._checksum(engines)
        inline = any(checksum not in e.checksums for e in engines)  # by a node of an older Foray
        encoded = b"" if inline else self._encoded_plan
        view = WeightView(
            run=self._run,
            epoch=version.epoch,
            step=version.step,
            number=self._number,
            phase="prepare",
            members=members,
            rank_offsets=tuple(offsets[:-1]),
            group=rendezvous.name,
            address=rendezvous.address,
            port=rendezvous.port,
            world_size=rendezvous.world_size,
            backend=self._settings.backend,
            buckets=self._plan if inline else (),
            plan=hashlib.sha256(encoded).hexdigest() if encoded else "",
            checksum=checksum,
            flattened=self._settings.flattened,
            committed=tuple(self._committed),
            proof=proof.bucket if proof else None,
        )
        return Transfer(
            self._link, self._sender, view, sums, {member_of(e): _dtype(e) for e in engines}, self._access, encoded
        )

    def _rendezvous(self, name: str, world_size: int) -> Rendezvous:
        s = self._settings
        return Rendezvous(
            name=name,
            address=self._address,
            port=s.port or free_port(self._address),
            world_size=world_size,
            backend=s.backend,
            join_s=self._limits.join_s,
            timeout_s=self._limits.transfer_s(len(self._plan)),
            stall_s=2 * self._limits.stall_s,  # the transfer itself notices first, and knows who is late
        )

    def _keep_copy(self, packed: Iterator[PackedBucket], copy: list[KeptBucket]) -> Iterator[PackedBucket]:
        """Yield the buckets and copy them; each replaces a bucket of the previous version's copy."""
        with self._copy_lock:
            old, self._copy = self._copy, None
        for one in packed:
            if old is not None and old[1]:
                del old[1][0]
            yield one  # sent before it is copied
            copy.append(KeptBucket(one.bucket, self._staging.copy(one.flat)))

    def _sent(self, version: PolicyVersion, transfer: Transfer, copy: list[KeptBucket]) -> WeightUpdate:
        self._membership.succeeded()
        self._transfer = transfer
        with self._copy_lock:
            self._copy = version, copy
        self._counts["publish_distributed"] += 1
        total = sum(num_bytes(one.bucket) for one in copy)
        self._last = {f"publish_{phase}_s": seconds for phase, seconds in transfer.seconds.items()}
        self._last |= {"publish_bytes": total, "publish_members": len(transfer.view.members)}
        return WeightUpdate(
            run=self._run,
            epoch=version.epoch,
            step=version.step,
            digest=transfer.digest(),
            transport="distributed",
            path="",
            num_bytes=total,
            broadcast=True,
        )

    # --- files ---

    def _failed(self, transfer: Transfer, error: BaseException | None) -> None:
        """Abort the group and the view; if Redis is unavailable, the members run into their deadline."""
        if self._sender is not None:
            self._sender.abort()
        self._close_group()
        self._limits.failed(error)
        self._membership.failed(error.missing if isinstance(error, TransferFailed) else ())
        try:
            transfer.abort()
        except RedisUnavailable as unavailable:
            log.warning("could not notify the members of view %d: %s", transfer.view.number, unavailable)

    def _fall_back(
        self,
        version: PolicyVersion,
        rest: Iterator[PackedBucket],
        copy: list[KeptBucket],
        sums: SourceChecksums | None,
        error: TransferFailed | PackingError | RedisUnavailable,
    ) -> WeightUpdate:
        """Write files of the gathered and the remaining buckets. Raises PackingError if they differ from the policy."""
        if isinstance(error, PackingError):
            raise error
        for _ in rest:
            pass
        kept = [one.packed() for one in copy]
        if sums is not None:
            for one in kept:
                sums.check(one)
        return self._write(version, (named for one in kept for named in one.tensors()))

    def _publish_by_disk(self, version: PolicyVersion, named: Iterator[Named], why: str) -> WeightUpdate:
        log.info("publishing %s as files: %s", version.label, why)
        with self._copy_lock:
            self._copy = None
        seen: list[Named] = []

        def passing() -> Iterator[Named]:
            for name, tensor in named:
                seen.append((name, torch.empty_like(tensor, device="meta")))
                yield name, tensor

        update = self._write(version, passing())
        self._set_plan(seen)
        return update

    def _set_plan(self, named: Sequence[Named]) -> None:
        whole = layout(named)
        size = min(self._settings.bucket_mb << 20, max(SMALLEST_BUCKET, num_bytes(whole) // PIECES))
        self._plan = plan(whole, size)
        self._encoded_plan = encode(WeightPlan(buckets=self._plan))

    def _write(self, version: PolicyVersion, named: Iterable[Named]) -> WeightUpdate:
        began = time.monotonic()
        update = self._disk.publish(version, named)
        self._counts["publish_disk"] += 1
        self._last |= {"publish_disk_s": time.monotonic() - began, "publish_bytes": update.num_bytes}
        return update.model_copy(update={"broadcast": True})

    def _snapshot(self, update: WeightUpdate) -> WeightUpdate | None:
        """Write files of a version that was sent; return None if the next version has replaced its copy."""
        with self._writing:  # by either thread, but only once
            known = self._announcement.update
            if known is not None and known.version == update.version and known.path:
                return known
            with self._copy_lock:
                if self._copy is None or self._copy[0] != update.version:
                    return None
                copy = list(self._copy[1])
            written = self._disk.publish(update.version, (named for one in copy for named in one.packed().tensors()))
            return written.model_copy(update={"transport": "distributed", "broadcast": True})

    def _close_group(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._closing = [sender for sender in self._closing if sender.alive] + [self._sender]
        self._sender, self._group = None, ()


def _checked(packed: Iterator[PackedBucket], check: Check | None) -> Iterator[PackedBucket]:
    for one in packed:
        if check is not None:
            check(one)
        yield one


def _dtype(engine: EngineInfo) -> str:
    """Return torch's name of the engine's reported dtype; "" if missing or unknown."""
    return engine.dtype if isinstance(getattr(torch, engine.dtype or "dtype", None), torch.dtype) else ""
