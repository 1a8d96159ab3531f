"""How many requests this server has in flight at one engine: additive increase, multiplicative decrease. Pure.

An engine with too many requests puts some back for want of KV cache and computes them again (a retraction), or lets
them queue, where they grow stale and cannot go elsewhere. Several rollout servers that shrink and grow by the same
rule share an engine fairly without knowing of each other (Chiu and Jain, 1989).
"""

from __future__ import annotations

import math

from protocol.messages import EngineInfo

SHRINK = 0.7
PERIOD_S = 2.0
"""One change in so long at most: a node's heartbeat, so that the engine's answer to the last change is seen first."""
RETURNING = 1.5
"""Size of the window, in its own units, for later turns of trajectories that were generated at this engine."""
UNKNOWN_CAPACITY = 1024
"""Requests for an engine that does not say how many it runs together."""


class Window:
    """Requests in flight from here to one incarnation of an engine.

    Starts at what the engine runs together (`max_running`). Ceiling: that and a headroom of a sixteenth, which waits at
    the engine and fills the gap when another ends. Floor: a sixteenth. Shrinks to 0.7 of itself when more than
    twice the headroom wait there, or requests were retracted since the last look; grows by the headroom when it was
    full and the engine was quiet. It never shrinks again before the last time has had its effect: before as many
    requests are in flight as may be, later turns of trajectories (`RETURNING`) included where there were any.
    """

    def __init__(self, engine: EngineInfo, now: float) -> None:
        capacity = engine.max_running or UNKNOWN_CAPACITY
        self._headroom = max(2, capacity // 16)
        self._ceiling, self._floor = capacity + self._headroom, max(1, capacity // 16)
        self._size = float(capacity)
        self._retractions = engine.retractions
        self._changed_at = now
        self._was_full = self._exceeded = False
        self.in_flight = 0

    @property
    def size(self) -> int:
        return int(self._size)

    def room(self, *, returning: bool = False) -> bool:
        """Whether one more may go. A window that says no is one that could grow.

        returning  a later turn of a trajectory that was generated here: it may exceed the window by half, since the
                   wait for this engine costs less than computing its prefix again at another
        """
        free = self.in_flight < self.size * (RETURNING if returning else 1.0)
        self._was_full = self._was_full or not free
        self._exceeded = self._exceeded or (free and self.in_flight >= self.size)
        return free

    def observe(self, engine: EngineInfo, now: float) -> None:
        """Draw the conclusions of what the engine reports now."""
        if now - self._changed_at < PERIOD_S:
            return
        quiet = engine.waiting <= self._headroom
        struggles = engine.waiting > 2 * self._headroom or engine.retractions > self._retractions
        self._retractions = engine.retractions
        size = self._size
        if struggles and self.in_flight <= math.ceil(size * (RETURNING if self._exceeded else 1.0)):
            self._size = max(self._floor, SHRINK * size)
        elif quiet and not struggles and self._was_full:
            self._size = min(self._ceiling, size + self._headroom)
        if self._size != size or not struggles:
            self._was_full = self._exceeded = False
            self._changed_at = now
