"""Engine side of a weight-update group: one rank of a gloo group in which the trainer is rank 0.

SGLang's `init_weights_update_group` connects with `PrefixStore(name, TCPStore)` and a private helper of torch. This
module does the same, so that a trainer does not depend on the kind of engine.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]  # not in __all__
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from protocol.runtime.torch_safety import gloo_at

log = logging.getLogger(__name__)


Sink = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class RendezvousSpec:
    """How to join: as rank `rank` of `world_size`, at `address`:`port`, under `name`."""

    name: str
    address: str
    port: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class TensorSpec:
    """An announced tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """The tensors of one call: one broadcast per tensor in order, or a single one of all bytes if `flattened`."""

    parts: Sequence[TensorSpec]
    flattened: bool


class GroupLost(Exception):
    """The group was not formed, or the trainer is gone or late. The message names the cause."""


class UpdateGroup:
    """Membership in a group, with a thread.

    Loop: joins, then consumes buckets in the order of `receive`; produces tensors for their sinks. Waits for the next
    bucket and (in torch, without the GIL) for the trainer; unblocked by `leave`, by the end of the trainer, or by the
    timeout. gloo cannot be interrupted: after `leave` during a join or a receive, the thread ends at the timeout, and
    `leave` does not wait for it.
    """

    def __init__(self, rendezvous: RendezvousSpec, timeout_s: float) -> None:
        self._meeting, self._timeout = rendezvous, timedelta(seconds=timeout_s)
        self._orders: queue.SimpleQueue[tuple[Bucket, Sink, Future[None]] | None] = queue.SimpleQueue()
        self._pending: set[Future[None]] = set()
        self._flat = torch.empty(0, dtype=torch.uint8)
        self.joined: Future[None] = Future()
        self.left: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, name=f"group {rendezvous.name}", daemon=True)
        self.thread.start()

    def receive(self, bucket: Bucket, sink: Sink) -> Future[None]:
        """Receive the broadcast of `bucket`. Done when all tensors are in the sink. Fails with GroupLost."""
        done: Future[None] = Future()
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)
        self._orders.put((bucket, sink, done))
        return done

    def leave(self) -> Future[None]:
        """Leave the group. Buckets in progress fail at once; then the future is done without waiting for gloo."""
        pending = [done for done in list(self._pending) if _settle(done, GroupLost("the group was destroyed"))]
        self._orders.put(None)
        if pending:
            _settle(self.left)
        return self.left

    def _run(self) -> None:
        try:
            store, group = self._join()
        except (RuntimeError, ValueError) as error:
            _settle(self.joined, GroupLost(_first_line(error)))
            return
        _settle(self.joined)
        while (order := self._orders.get()) is not None:
            bucket, sink, done = order
            if done.done():
                continue
            try:
                self._receive(group, bucket, sink)
                _settle(done)
            except RuntimeError as error:
                _settle(done, GroupLost(_first_line(error)))
        try:
            torch.distributed.destroy_process_group(group)
        except RuntimeError as error:  # the group is already broken
            log.warning("group %s: %s", self._meeting.name, _first_line(error))
        del group, store
        _settle(self.left)

    def _join(self) -> tuple[TCPStore, ProcessGroup]:
        m = self._meeting
        store = TCPStore(m.address, m.port, m.world_size, False, self._timeout, wait_for_workers=False)
        with gloo_at(m.address):
            group, _ = _new_process_group_helper(
                m.world_size,
                m.rank,
                [],
                Backend("gloo"),
                PrefixStore(m.name, store),
                group_name=GroupName(m.name),
                timeout=self._timeout,
            )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(m.world_size)}
        return store, group

    def _receive(self, group: ProcessGroup, bucket: Bucket, sink: Sink) -> None:
        if not bucket.flattened:
            for part in bucket.parts:
                tensor = torch.empty(part.shape, dtype=part.dtype)
                torch.distributed.broadcast(tensor, src=0, group=group)
                sink(part.name, tensor)
            return
        total = sum(part.num_bytes for part in bucket.parts)
        if total > len(self._flat):  # reused for all buckets: touching new pages costs as much as the transfer
            self._flat = torch.empty(total, dtype=torch.uint8)
        flat = self._flat[:total]
        torch.distributed.broadcast(flat, src=0, group=group)
        start = 0
        for part in bucket.parts:
            piece = flat[start : start + part.num_bytes]
            start += part.num_bytes
            aligned = piece if piece.storage_offset() % part.dtype.itemsize == 0 else piece.clone()
            sink(part.name, aligned.view(part.dtype).view(part.shape))


def _settle(future: Future[None], error: Exception | None = None) -> bool:
    """Complete a future unless it is done. Return whether this call completed it."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
