"""Everything of weight publishing that needs CUDA: the NCCL group, and buckets that wait on the GPU.

Kept thin, behind `WeightGroup` and `Staging`, whose other implementations run in the tests. The group has run on one
H100 (`foray bench transfer`: broadcasts, a member that is killed, one that hangs), the staging on no GPU. What they
rely on is in torch's source and documentation:

* `ProcessGroupNCCL` reads TORCH_NCCL_* in its constructor. With asynchronous error handling off, its watchdog neither
  tears down the process nor touches a group that a caller aborts.
* A broadcast returns once it is enqueued; `Work.wait` makes the current stream wait, not the thread.
* `abort` ends the kernels of a communicator, whose events then complete.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch

from learner.weights.process_group import POLL_S, Rendezvous, open_group
from protocol.runtime.torch_safety import interface_variables

log = logging.getLogger(__name__)

NO_TIMEOUT = timedelta(days=1)
"""Timeout of torch's watchdog: after one it may dump and end the process. The `StallTimer` is always earlier."""
UNWATCHED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
PIECE = 64 << 20
"""Bytes of one pinned buffer."""
ROOM = 0.5
"""Part of the free memory of the GPU that buckets may take before the pause: training needs the rest."""
_ENVIRONMENT = threading.Lock()


class NcclGroup:
    """Rank 0 of an NCCL group without a watchdog; its broadcasts run on a stream of their own."""

    lazy = True

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self._device)  # a new thread starts at device 0
        self.name = rendezvous.name
        # NCCL reads these once, when the first communicator of the process is made
        os.environ.update(interface_variables(rendezvous.address))
        with unwatched():
            self._store, self._group = open_group(rendezvous, NO_TIMEOUT)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._aborted = False

    def mark(self) -> torch.cuda.Event:
        """Return an event after the work that the calling thread has enqueued."""
        return _event()

    def start(self, tensor: torch.Tensor, after: torch.cuda.Event) -> Callable[[], bool]:
        """Enqueue a broadcast; it connects the ranks if it is the first one."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            tensor = tensor.to(self._device)
            tensor.record_stream(self._stream)
            work = torch.distributed.broadcast(tensor, src=0, group=self._group, async_op=True)
            assert work is not None
            work.wait()
            sent = _event()
        return partial(_reached, sent)

    def abort(self) -> None:
        """End the kernels and forget the group; a thread that still connects is left to NCCL's own timeouts."""
        from torch.distributed.distributed_c10d import _abort_process_group

        self._aborted = True
        _abort_process_group(self._group)

    def close(self) -> None:
        """Leave the group. Raises RuntimeError."""
        try:
            if not self._aborted:
                torch.distributed.destroy_process_group(self._group)
        finally:
            del self._group, self._store


@contextmanager
def unwatched() -> Iterator[None]:
    """Make NCCL groups in the block that cannot end the process; DeepSpeed's own groups keep their watchdog."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in UNWATCHED}
        os.environ.update(UNWATCHED)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class CudaStaging:
    """Buckets on the GPU; a thread copies them to main memory over two pinned buffers, on a stream of its own.

    Loop: consumes buckets; produces copies; waits for the stream; ended by `close`.
    """

    deferred = True

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "copy weights")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pinned: list[torch.Tensor] = []
        self._room = 0
        self._under_way: deque[tuple[int, Future[torch.Tensor]]] = deque()

    def room(self) -> int:
        """Return the bytes of buckets that may wait on the GPU."""
        free, _ = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        self._room = int(ROOM * (free + cached))
        self._forget()
        return self._room

    def copy(self, flat: torch.Tensor) -> Future[torch.Tensor]:
        """Copy a bucket, [n] uint8, whose tensors the calling thread has enqueued. Waits if too many are waiting."""
        complete = _event()
        flat.record_stream(self._stream)
        self._forget()
        while self._under_way and sum(size for size, _ in self._under_way) + flat.numel() > self._room:
            self._under_way.popleft()[1].result()
        done = self._pool.submit(self._copy, flat, complete, torch.cuda.current_device())
        self._under_way.append((flat.numel(), done))
        return done

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _forget(self) -> None:
        while self._under_way and self._under_way[0][1].done():
            self._under_way.popleft()

    def _copy(self, flat: torch.Tensor, complete: torch.cuda.Event, device: int) -> torch.Tensor:
        torch.cuda.set_device(device)
        if not self._pinned:
            self._pinned = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        out = torch.empty(flat.shape, dtype=torch.uint8)
        filled: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event] | None = None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(complete)
            for number, start in enumerate(range(0, flat.numel(), PIECE)):
                piece = flat[start : start + PIECE]
                pinned = self._pinned[number % 2][: piece.numel()]
                pinned.copy_(piece, non_blocking=True)
                event = _event()
                if filled is not None:
                    _drain(*filled)
                filled = out[start : start + PIECE], pinned, event
            if filled is not None:
                _drain(*filled)
        return out


def _event() -> torch.cuda.Event:
    """Return an event after what this thread has enqueued on its current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _reached(event: torch.cuda.Event) -> bool:
    """Return whether the GPU has passed the event; never waits. Raises RuntimeError after an error on the GPU."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def _drain(out: torch.Tensor, pinned: torch.Tensor, copied: torch.cuda.Event) -> None:
    while not _reached(copied):
        time.sleep(POLL_S)
    out.copy_(pinned)
