"""The trainer's side of an engine's weight-update group: rank 0 of a second process group.

SGLang's `init_weights_update_group` joins with `PrefixStore(name, TCPStore)` and a group helper of torch that is not
public; `torch.distributed.init_process_group` cannot join it (and would clash with DeepSpeed's group). So this
module does the same. Both sides need the same version of torch.
"""

from __future__ import annotations

import errno
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any, Protocol, cast

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]  # not in __all__

from protocol.runtime.torch_safety import gloo_at

log = logging.getLogger(__name__)

POLL_S = 0.0005
"""Seconds between checks whether a broadcast is complete: a bucket of 256 MiB takes 3 to 30 ms between GPUs."""


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of a group's ranks.

    join_s     timeout for joining, and for the proof
    timeout_s  timeout of a broadcast that cannot be aborted
    stall_s    a group that completes nothing for this long is aborted, if it can be, also while nobody waits for it
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    join_s: float
    timeout_s: float
    stall_s: float = float("inf")


class WeightGroup(Protocol):
    """Rank 0 of a weight-update group. Opened and used by the thread of one `GroupSender`, except where noted."""

    lazy: bool
    """It connects in its first broadcast, which returns before it is complete. `abort` ends a broadcast that hangs."""

    def __init__(self, rendezvous: Rendezvous) -> None: ...

    def mark(self) -> Any:
        """Record on the calling thread's stream when its tensors are complete, and return that event. Any thread."""

    def start(self, tensor: torch.Tensor, after: Any) -> Callable[[], bool]:
        """Start to send `tensor`, which is complete `after` a mark; the result tells whether it has been sent.

        Both raise RuntimeError if the group is broken, if it is able to tell.
        """

    def abort(self) -> None:
        """End all broadcasts, which then count as failed. Called by another thread while this one may hang in NCCL."""

    def close(self) -> None:
        """Leave the group, once, also after `abort`. Raises RuntimeError."""


class BroadcastGroup:
    """Rank 0 of a group of `world_size` ranks under `name`, listening at `address`:`port`.

    Constructing blocks until every rank has joined; raises RuntimeError (torch's DistError) after `join_s`. `timeout_s`
    bounds each broadcast.
    """

    lazy = False

    def __init__(self, rendezvous: Rendezvous) -> None:
        from torch.distributed import distributed_c10d

        self.name = rendezvous.name
        with gloo_at(rendezvous.address):
            self._store, self._group = open_group(rendezvous, timedelta(seconds=rendezvous.join_s))
        # torch 2.14 has a public function, and warns of the other
        set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=rendezvous.timeout_s), self._group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send `tensor` to every other rank; blocks. Raises RuntimeError if a rank is gone or late."""
        torch.distributed.broadcast(tensor, src=0, group=self._group)

    def mark(self) -> None:
        """Return None: tensors in main memory are complete when the call that makes them returns."""

    def start(self, tensor: torch.Tensor, after: None = None) -> Callable[[], bool]:
        """Broadcast, to the end."""
        self.broadcast(tensor)
        return _sent

    def abort(self) -> None:
        """Do nothing: gloo cannot be interrupted. `timeout_s` ends a broadcast."""

    def close(self) -> None:
        """Leave the group, once; pending receives of other ranks fail. Never raises for a broken group."""
        try:
            torch.distributed.destroy_process_group(self._group)
        finally:
            del self._group, self._store


def _sent() -> bool:
    return True


def open_group(rendezvous: Rendezvous, timeout: timedelta) -> tuple[TCPStore, ProcessGroup]:
    """Return the store and the group as torch makes them, with `timeout` for the group's operations so far.

    Raises RuntimeError, ValueError and OSError.
    """
    from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

    meeting, join = rendezvous, timedelta(seconds=rendezvous.join_s)
    # Rank 0 owns the store, as with `tcp://`; the others are its clients.
    # It has no authentication, so it listens only at this address, not on every interface as by default.
    listener = _listener(meeting.address, meeting.port)
    fd = None if listener is None else listener.detach()
    store = TCPStore(
        meeting.address, meeting.port, meeting.world_size, True, join, wait_for_workers=False, master_listen_fd=fd
    )
    group, _ = _new_process_group_helper(
        meeting.world_size,
        0,
        [],
        Backend(meeting.backend),
        PrefixStore(meeting.name, store),
        group_name=GroupName(meeting.name),
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(meeting.world_size)}
    return store, group


def _listener(address: str, port: int) -> socket.socket | None:
    """Return a socket listening only at `address`; None if it is not an address of this host (NAT)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise RuntimeError(f"cannot listen on {address}:{port}: {error.strerror}") from None
        log.warning("%s is not an address of this host: the update group listens on every interface", address)
        return None


GROUPS = {
    "gloo": "learner.weights.process_group:BroadcastGroup",
    "nccl": "learner.weights.cuda:NcclGroup",
}
"""Backend -> "module:Class" of its `WeightGroup`."""


def is_lazy(backend: str) -> bool:
    """Return whether the groups of `backend` are lazy (`WeightGroup.lazy`)."""
    return group_class(backend).lazy


def group_class(backend: str) -> type[WeightGroup]:
    """Return the class of the groups of `backend`."""
    return cast("type[WeightGroup]", resolve_name(GROUPS[backend]))


class StallTimer:
    """Calls `expired` once, in its own thread, when what is expected has not happened in time.

    Loop: consumes deadlines; produces one call; waits for the deadline; unblocked by `expect`, `expire` and `close`.
    """

    def __init__(self, name: str, expired: Callable[[], None]) -> None:
        self.fired = threading.Event()
        """Set before `expired` is called."""
        self._expired, self._changed = expired, threading.Condition()
        self._due: float | None = None
        self._closed = self._expire = False
        self._thread = threading.Thread(target=self._run, name=f"stall {name}", daemon=True)
        self._thread.start()

    def expect(self, seconds: float | None) -> None:
        """Expect the next call within `seconds`; None: nothing is under way."""
        with self._changed:
            self._due = None if seconds is None else time.monotonic() + seconds
            self._changed.notify()

    def expire(self) -> None:
        """Fire now. An `expect` that follows, by another thread that knows nothing of it, does not revoke it."""
        with self._changed:
            self._expire = True
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread; wait for an `expired` that it is calling."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left_s = None if self._due is None else min(self._due - time.monotonic(), threading.TIMEOUT_MAX)
                if self._expire or (left_s is not None and left_s <= 0):
                    break
                self._changed.wait(left_s)
            else:
                return
        self.fired.set()
        try:
            self._expired()
        except RuntimeError as error:
            log.warning("aborting the update group: %s", error)


@dataclass(frozen=True)
class Order:
    """Tensors to send once they are complete, `after` a mark."""

    tensors: Sequence[torch.Tensor]
    after: Any
    done: Future[None]


class GroupSender:
    """The thread of one group: joins it as rank 0, broadcasts tensors, and closes it.

    gloo cannot be interrupted, so every wait for this thread has a deadline; a hanging broadcast ends when
    the group's timeout expires, and the thread then closes the group. A lazy group is aborted by a `StallTimer` when it
    completes nothing for `stall_s`, and by `abort`.

    Loop: consumes lists of tensors in the order of `send`; produces broadcasts, and done futures. Waits for the next
    list, and for the other ranks; is unblocked by `close`, by `abort`, or by the group's timeout.
    """

    def __init__(self, rendezvous: Rendezvous, proof: torch.Tensor | None = None) -> None:
        """proof  sent by a lazy group before it counts as joined; the members receive it before they are prepared"""
        self.rendezvous = rendezvous
        self.joined: Future[None] = Future()
        self._proof = proof
        self._group: WeightGroup | None = None
        self._timer: StallTimer | None = None
        self._broken = ""
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"send {rendezvous.name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the thread is still running."""
        return self._thread.is_alive()

    def send(self, tensors: Sequence[torch.Tensor]) -> Future[None]:
        """Broadcast them one by one; the future fails with RuntimeError if a rank is gone or late.

        Called by the thread that makes the tensors, once the group is joined.
        """
        order = Order(tensors, self._group.mark() if self._group is not None else None, Future())
        self._orders.put(order)
        return order.done

    def abort(self) -> None:
        """Abort a lazy group, without waiting: whatever is being sent fails."""
        if self._timer is not None:
            self._timer.expire()

    def close(self) -> None:
        """Close the group after the current send, without waiting."""
        self._orders.put(None)

    def join(self) -> None:
        """Wait for the thread until its timeouts: torch crashes if it still runs at exit."""
        self._thread.join(self.rendezvous.join_s + self.rendezvous.timeout_s)

    def _run(self) -> None:
        meeting = self.rendezvous
        try:
            group = group_class(meeting.backend)(meeting)
        except (RuntimeError, ValueError, OSError) as error:
            self.joined.set_exception(error)
            return
        timer = StallTimer(meeting.name, group.abort) if group.lazy else None
        self._group, self._timer = group, timer
        if timer is not None and self._proof is not None:
            self._prove(group, timer, self._proof)
        else:
            self.joined.set_result(None)
        self._serve(group)
        if timer is not None:
            timer.close()
        try:
            group.close()
        except RuntimeError as error:
            log.info("closing group %s: %s", meeting.name, error)

    def _prove(self, group: WeightGroup, timer: StallTimer, proof: torch.Tensor) -> None:
        """Settle `joined` when the proof has reached every rank."""
        timer.expect(self.rendezvous.join_s)
        try:
            sent = group.start(proof, group.mark())
            while not sent() and not timer.fired.wait(POLL_S):
                pass
            if timer.fired.is_set():
                raise RuntimeError(f"not every rank has connected within {self.rendezvous.join_s:g} s")
        except RuntimeError as error:
            self._broken = str(error)
            self.joined.set_exception(error)
            return
        timer.expect(None)
        self.joined.set_result(None)

    def _serve(self, group: WeightGroup) -> None:
        under_way: deque[tuple[Order, list[Callable[[], bool]]]] = deque()
        closing = False
        while under_way or not closing:
            try:
                order = self._orders.get(timeout=POLL_S if under_way else None)
            except queue.Empty:
                pass
            else:
                closing = closing or order is None
                if order is not None:
                    self._start(group, order, under_way)
            self._settle(under_way)

    def _start(
        self, group: WeightGroup, order: Order, under_way: deque[tuple[Order, list[Callable[[], bool]]]]
    ) -> None:
        if self._timer is not None and not under_way:
            self._timer.expect(self.rendezvous.stall_s)
        try:
            if self._broken:
                raise RuntimeError("an earlier broadcast of this group has failed")
            under_way.append((order, [group.start(tensor, order.after) for tensor in order.tensors]))
        except RuntimeError as error:
            self._broken = str(error)
            order.done.set_exception(error)

    def _settle(self, under_way: deque[tuple[Order, list[Callable[[], bool]]]]) -> None:
        """Complete the orders that have been sent, or fail all if one has failed or the group was aborted."""
        timer = self._timer
        while under_way:
            order, sent = under_way[0]
            try:
                complete = all(check() for check in sent)
                # an aborted broadcast looks complete
                if timer is not None and timer.fired.is_set():
                    raise RuntimeError(
                        f"it was aborted: nothing arrived for {self.rendezvous.stall_s:g} s, or a member failed"
                    )
            except RuntimeError as error:
                self._broken = str(error)
                order.done.set_exception(error)
            else:
                if not complete:
                    return
                order.done.set_result(None)
            under_way.popleft()
            if timer is not None:
                timer.expect(self.rendezvous.stall_s if under_way else None)
