"""The circuit breaker over all replicas: open while none of them can be used. Pure.

    closed     --(the last usable replica is put aside)--> open
    open       --(a probe is sent)-->                      half open --(it fails)--> open
    half open  --(it succeeds)-->                          closed, with a small window at that replica

While it is not closed, searches wait in their places and no new task is leased: an outage costs time and not rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from rollout_server.search.replica import Replica


class State(StrEnum):
    """`gauge` is what the metric shows."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"

    @property
    def gauge(self) -> float:
        return {State.CLOSED: 0.0, State.HALF_OPEN: 0.5, State.OPEN: 1.0}[self]


class Breaker:
    """Reads the replicas; nothing is stored twice, so the two cannot disagree."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    def usable(self) -> bool:
        """Whether any replica may be asked."""
        return any(replica.up for replica in self._replicas)

    @property
    def state(self) -> State:
        if self.usable:
            return State.CLOSED
        return State.HALF_OPEN if any(replica.looking for replica in self._replicas) else State.OPEN

    @property
    def reason(self) -> str:
        """Why it is not closed, "" when it is: each address with its cause."""
        if self.state is State.CLOSED:
            return ""
        return ", ".join(f"{replica.cause} at {replica.url}" for replica in self._replicas)
