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
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]  # not in __all__

from protocol.runtime.torch_safety import gloo_at

log = logging.getLogger(__name__)


class BroadcastGroup:
    """Rank 0 of a group of `world_size` ranks under `name`, listening at `address`:`port`.

    Constructing blocks until every rank has joined; raises RuntimeError (torch's DistError) after `join_s` (by default
    `timeout_s`). `timeout_s` bounds each broadcast.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        port: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        join_s: float | None = None,
    ) -> None:
        from torch.distributed.distributed_c10d import (
            Backend,
            GroupName,
            _new_process_group_helper,
            _set_pg_timeout,
            _world,
        )

        timeout = timedelta(seconds=timeout_s if join_s is None else join_s)
        self.name = name
        # Rank 0 owns the store, as with `tcp://`; the others are its clients.
        # It has no authentication, so it listens only at this address, not on every interface as by default.
        listener = _listener(address, port)
        fd = None if listener is None else listener.detach()
        self._store = TCPStore(address, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=fd)
        self._group: ProcessGroup
        with gloo_at(address):
            self._group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                Backend(backend),
                PrefixStore(name, self._store),
                group_name=GroupName(name),
                timeout=timeout,
            )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
        _set_pg_timeout(timedelta(seconds=timeout_s), self._group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send `tensor` to every other rank; blocks. Raises RuntimeError if a rank is gone or late."""
        torch.distributed.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        """Leave the group, once; pending receives of other ranks fail. Never raises for a broken group."""
        try:
            torch.distributed.destroy_process_group(self._group)
        finally:
            del self._group, self._store


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


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of a group's ranks; `join_s` bounds joining, `timeout_s` every broadcast."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    join_s: float
    timeout_s: float


class GroupSender:
    """The thread of one group: joins it as rank 0, broadcasts tensors, and closes it.

    gloo cannot be interrupted, so every wait for this thread has a deadline; a hanging broadcast ends when
    the group's timeout expires, and the thread then closes the group.

    Loop: consumes lists of tensors in the order of `send`; produces broadcasts, and done futures. Waits for the next
    list, and for the other ranks; is unblocked by `close`, or by the group's timeout.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.joined: Future[None] = Future()
        self._orders: queue.SimpleQueue[tuple[Sequence[torch.Tensor], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"send {rendezvous.name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the thread is still running."""
        return self._thread.is_alive()

    def send(self, tensors: Sequence[torch.Tensor]) -> Future[None]:
        """Broadcast them one by one; the future fails with RuntimeError if a rank is gone or late."""
        done: Future[None] = Future()
        self._orders.put((tensors, done))
        return done

    def close(self) -> None:
        """Close the group after the current send, without waiting."""
        self._orders.put(None)

    def join(self) -> None:
        """Wait for the thread, which its timeouts end: torch crashes if it is running at exit."""
        self._thread.join(self.rendezvous.join_s + self.rendezvous.timeout_s)

    def _run(self) -> None:
        rendezvous = self.rendezvous
        try:
            group = BroadcastGroup(
                name=rendezvous.name,
                address=rendezvous.address,
                port=rendezvous.port,
                world_size=rendezvous.world_size,
                backend=rendezvous.backend,
                join_s=rendezvous.join_s,
                timeout_s=rendezvous.timeout_s,
            )
        except (RuntimeError, ValueError, OSError) as error:
            self.joined.set_exception(error)
            return
        self.joined.set_result(None)
        broken = False
        while (order := self._orders.get()) is not None:
            tensors, done = order
            try:
                if broken:
                    raise RuntimeError("an earlier broadcast of this group has failed")
                for tensor in tensors:
                    group.broadcast(tensor)
                done.set_result(None)
            except RuntimeError as error:
                broken = True
                done.set_exception(error)
        try:
            group.close()
        except RuntimeError as error:
            log.info("closing group %s: %s", rendezvous.name, error)
