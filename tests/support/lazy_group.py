"""A weight-update group with NCCL's behaviour over gloo, so that everything but the calls into CUDA runs without a GPU.

What NCCL does differently from gloo (torch's ProcessGroupNCCL), and this double too:

* the constructor and a broadcast return at once; whether it is complete is found by polling
* it sends what the GPU has finished when it is enqueued, so a mark must be taken where the tensors are made
* if a rank is gone or hangs, it hangs: no error, no timeout
* a watchdog ends the process when a broadcast takes longer than the group's timeout, unless it was aborted
* an aborted broadcast looks complete

The other ranks are real gloo ranks: the CPU engines of the tests do not notice the difference.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch

from learner.weights import process_group
from learner.weights.process_group import BroadcastGroup, Rendezvous

PATH = "tests.support.lazy_group:LazyGroup"


@dataclass(frozen=True)
class Mark:
    """Where in the work of which thread the tensors are complete."""

    thread: int


class LazyGroup:
    """A `WeightGroup`. `killed`: the groups whose watchdog would have ended the process."""

    lazy = True
    opened: ClassVar[list[LazyGroup]] = []
    killed: ClassVar[list[str]] = []
    stuck: ClassVar[threading.Event] = threading.Event()
    """While it is set, no broadcast completes, whatever gloo does."""
    alone: ClassVar[bool] = False
    """The other ranks are scripted and do not join: every broadcast succeeds."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.name, self._rendezvous = rendezvous.name, rendezvous
        self._work: queue.SimpleQueue[tuple[torch.Tensor, threading.Event] | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self.aborts = 0
        self.marks: list[Mark] = []
        self.thread = threading.Thread(target=self._run, name=f"lazy {self.name}", daemon=True)
        self.thread.start()
        LazyGroup.opened.append(self)

    def mark(self) -> Mark:
        return Mark(threading.get_ident())

    def start(self, tensor: torch.Tensor, after: Mark) -> Callable[[], bool]:
        assert isinstance(after, Mark), "it would send a tensor that may not be complete"
        self.marks.append(after)
        sent = threading.Event()
        self._work.put((tensor.contiguous(), sent))
        watchdog = threading.Timer(self._rendezvous.timeout_s, self._kill, [sent])
        watchdog.daemon = True
        watchdog.start()
        return partial(self._looks_complete, sent)

    def _looks_complete(self, sent: threading.Event) -> bool:
        return sent.is_set() or self._aborted.is_set()

    def _kill(self, sent: threading.Event) -> None:
        if not self._looks_complete(sent):
            LazyGroup.killed.append(self.name)

    def abort(self) -> None:
        self.aborts += 1
        self._aborted.set()
        self._work.put(None)

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        alone = replace(self._rendezvous, world_size=1)
        try:
            group = BroadcastGroup(alone if LazyGroup.alone else self._rendezvous)
        except (RuntimeError, ValueError, OSError):
            return  # every broadcast hangs
        with contextlib.suppress(RuntimeError):  # a rank is gone: this broadcast and all further ones hang
            while (work := self._work.get()) is not None:
                tensor, sent = work
                group.broadcast(tensor)
                while LazyGroup.stuck.is_set() and not self._aborted.is_set():
                    time.sleep(0.001)
                sent.set()
        with contextlib.suppress(RuntimeError):
            group.close()


@contextlib.contextmanager
def lazy_groups(patch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]  # a generator of the list
    """Use LazyGroup for backend "gloo" in the block; yields the groups that are opened. No watchdog may have fired."""
    patch.setitem(process_group.GROUPS, "gloo", PATH)
    LazyGroup.opened.clear()
    LazyGroup.killed.clear()
    LazyGroup.stuck.clear()
    try:
        yield LazyGroup.opened
    finally:
        LazyGroup.stuck.clear()
        for group in LazyGroup.opened:
            group.close()
            group.thread.join(30.0)  # torch crashes if it is in gloo at exit
    assert not LazyGroup.killed, "a watchdog would have ended the learner"


class DeviceStaging:
    """A `Staging` that behaves as the one on a GPU: values are read late, and copies take their time in a thread.

    free  bytes that it has room for
    """

    deferred = True
    free: ClassVar[int] = 1 << 40

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "copy weights")

    def room(self) -> int:
        return DeviceStaging.free

    def copy(self, flat: torch.Tensor) -> Future[torch.Tensor]:
        return self._pool.submit(self._copy, flat)

    def _copy(self, flat: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return flat.clone()

    def close(self) -> None:
        self._pool.shutdown()
