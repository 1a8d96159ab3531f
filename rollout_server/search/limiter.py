"""Adaptive limit of requests in flight at one retriever: additive increase, multiplicative decrease. Pure, no clock.

Rollout servers that follow this rule share a retriever fairly without coordination (Chiu and Jain, "Analysis of the
increase and decrease algorithms for congestion avoidance", 1989). As in TCP Vegas (Brakmo and Peterson, 1995) and the
gradient limits based on it (Netflix concurrency-limits), latency relative to the observed minimum signals congestion,
which is earlier than waiting for failures.

    target  = TOLERANCE * least, at least SLACK_S and at most a quarter of the timeout of an attempt
    least   = the minimum smoothed latency since the last outage of the retriever
    grow    by 1 per answer up to the size at which it last shrank (slow start, Jacobson 1988), beyond that by 1 per
            round trip, while the smoothed latency is below the target and at least half of the limit is in use
    shrink  to 0.7 of its size when the smoothed latency exceeds the target, or when the server rejected a request (429,
            503) or a request timed out. At most once per round trip: earlier requests do not count again.

TOLERANCE is large because retrievers batch: a full batch takes several times as long as a single query and answers
hundreds. Latencies below SLACK_S never count as congestion. Smoothing prevents single cached answers, hundreds of times
faster than a search, from making all searches look slow. If answers are still slow at FLOOR, the limit is not the
cause: the server has become slower, or other clients keep it busy, and the minimum latency is measured again.
"""

from __future__ import annotations

import math

START, FLOOR = 128, 4
"""Initial size; minimum size, also used after an outage."""
SHRINK = 0.7
TOLERANCE, SLACK_S = 12.0, 0.5
SMOOTHING = 1 / 8
"""Weight of the newest latency (Jacobson's smoothed round-trip time). Valid after 1 / SMOOTHING answers."""


class GradientLimit:
    """Limit of requests in flight to one retriever: `acquire`, then `on_success`, `on_dropped` or `on_ignored`.

    ceiling     maximum number of requests in flight
    timeout_s   timeout of a request; the target latency stays well below it
    """

    def __init__(self, *, ceiling: int, timeout_s: float, start: int = START) -> None:
        self._ceiling, self._floor, self._timeout_s = ceiling, min(FLOOR, ceiling), timeout_s
        self._size = float(min(start, ceiling))
        self._shrank_at = float(ceiling)
        self._next = self._first_since = 0
        """Number of the next request, and of the first one sent at the current size."""
        self._smooth, self._smoothed = 0.0, 0
        """Smoothed latency at the current size, and the number of answers in it."""
        self._least = float("inf")
        self.in_flight = 0

    @property
    def size(self) -> int:
        return int(self._size)

    @property
    def target_s(self) -> float:
        """Smoothed latency up to which the limit grows."""
        least = self._least if math.isfinite(self._least) else 0.0
        return min(max(SLACK_S, TOLERANCE * least), self._timeout_s / 4)

    def has_capacity(self) -> bool:
        """Return whether one more request may be sent."""
        return self.in_flight < self.size

    def acquire(self) -> int:
        """Count one more request. Return its number, for `on_success` or `on_dropped`."""
        self.in_flight += 1
        self._next += 1
        return self._next - 1

    def on_success(self, number: int, latency_s: float) -> None:
        """Record that the request was answered, correctly or not."""
        in_use = 2 * self.in_flight >= self.size
        self.in_flight -= 1
        if number < self._first_since:
            return
        self._smoothed += 1
        self._smooth += max(SMOOTHING, 1 / self._smoothed) * (latency_s - self._smooth)
        if self._smoothed * SMOOTHING < 1:
            return
        self._least = min(self._least, self._smooth)
        if self._smooth > self.target_s:
            if self.size == self._floor:
                self._least = self._smooth
            self._shrink()
        elif in_use:
            step = 1.0 if self._size < self._shrank_at else 1.0 / self._size
            self._size = min(self._ceiling, self._size + step)

    def on_dropped(self, number: int) -> None:
        """Record that the server rejected the request, or that it timed out."""
        self.in_flight -= 1
        if number >= self._first_since:
            self._shrink()

    def on_ignored(self) -> None:
        """Record that the request ended without information about the server's load."""
        self.in_flight -= 1

    def reset(self) -> None:
        """Reset to the minimum size and measure again: the server is back, and may be a different one."""
        self._size = float(self._floor)
        self._shrank_at = float(self._ceiling)
        self._smooth, self._smoothed, self._first_since = 0.0, 0, self._next
        self._least = float("inf")

    def _shrink(self) -> None:
        self._size = self._shrank_at = max(self._floor, SHRINK * self._size)
        self._smooth, self._smoothed, self._first_since = 0.0, 0, self._next
