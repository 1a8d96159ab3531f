"""The thread that speaks to torch: joins a weight-update group as rank 0, then broadcasts what it is given.

gloo cannot be interrupted. So nobody waits for this thread but with a deadline of his own; one that hangs in a
broadcast ends when the group's timeout is over, and closes the group then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from learner.publish.process_group import UpdateGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group find each other; `join_s` bounds the joining, `timeout_s` every broadcast."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    join_s: float
    timeout_s: float


class Sender:
    """One group, from joining to its end.

    Loop: consumes lists of tensors in the order of `send`; produces broadcasts, and done futures. Waits for the next
    list, and for the other ranks; is unblocked by `close`, or by the group's timeout.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.joined: Future[None] = Future()
        self._orders: queue.SimpleQueue[tuple[Sequence[torch.Tensor], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"send {meeting.name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has yet to end."""
        return self._thread.is_alive()

    def send(self, tensors: Sequence[torch.Tensor]) -> Future[None]:
        """Broadcast them one by one; the future fails with RuntimeError when a rank is gone or late."""
        done: Future[None] = Future()
        self._orders.put((tensors, done))
        return done

    def close(self) -> None:
        """End the group after what is being sent; does not wait."""
        self._orders.put(None)

    def join(self) -> None:
        """Wait for the thread's end, which one of its timeouts brings about: torch does not survive it at exit."""
        self._thread.join(self.meeting.join_s + self.meeting.timeout_s)

    def _run(self) -> None:
        meeting = self.meeting
        try:
            group = UpdateGroup(
                name=meeting.name,
                address=meeting.address,
                port=meeting.port,
                world_size=meeting.world_size,
                backend=meeting.backend,
                join_s=meeting.join_s,
                timeout_s=meeting.timeout_s,
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
            log.info("group %s is closed: %s", meeting.name, error)
