"""How many requests are in flight at one retriever: additive increase, multiplicative decrease. Pure, without a clock.

Several rollout servers that grow by sums and shrink by factors share a retriever fairly without coordination
(Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion avoidance", 1989). As in TCP Vegas
(Brakmo and Peterson, 1995) and the gradient limits built on it (Netflix concurrency-limits), the sign of congestion is
latency against the least that was seen, and not only failure: it comes before anything fails.

    target  = TOLERANCE * least, at least SLACK_S and at most a quarter of an attempt's time
    least   = the least smoothed latency seen since the retriever was last away
    grow    by 1 an answer up to the size at which it last shrank (slow start, Jacobson 1988), by 1 a round trip beyond
            it, while the smoothed latency is below the target and at least half of the limit is in use
    shrink  to 0.7 of itself when the smoothed latency is above the target, or the server rejected (429, 503) or let a
            request run out of time; then not again for what was sent before: once a round trip

TOLERANCE is large because retrievers batch: a full batch takes several times as long as a lone query and answers
hundreds. SLACK_S is a latency that never counts as congestion. Smoothing keeps single answers from a cache, hundreds of
times faster than a search, from making all searches look slow. A limit that has shrunk to FLOOR and still finds answers
slow is not the cause: the server has become slower for good, or others keep it busy, and the least latency is measured
again.
"""

from __future__ import annotations

import math

START, FLOOR = 128, 4
"""First size; the least size, and that after an outage."""
SHRINK = 0.7
TOLERANCE, SLACK_S = 12.0, 0.5
SMOOTHING = 1 / 8
"""Weight of the newest latency (Jacobson's smoothed round-trip time). As many answers make it a measure."""


class GradientLimit:
    """Most requests in flight from here to one retriever: `acquire`, then `on_success`, `on_dropped` or `on_ignored`.

    ceiling     most requests in flight
    timeout_s   time after which a request is given up; the target stays well below it
    """

    def __init__(self, *, ceiling: int, timeout_s: float, start: int = START) -> None:
        self._ceiling, self._floor, self._timeout_s = ceiling, min(FLOOR, ceiling), timeout_s
        self._size = float(min(start, ceiling))
        self._shrank_at = float(ceiling)
        self._next = self._first_since = 0
        """Number of the next request, and of the first that was sent at the present size."""
        self._smooth, self._smoothed = 0.0, 0
        """Smoothed latency at the present size, and of how many answers."""
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
        """Whether one more request may be sent."""
        return self.in_flight < self.size

    def acquire(self) -> int:
        """Count one more request; returns its number, to be passed to `on_success` or `on_dropped`."""
        self.in_flight += 1
        self._next += 1
        return self._next - 1

    def on_success(self, number: int, latency_s: float) -> None:
        """The request was answered, well or not."""
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
        """The request was rejected by the server, or ran out of time."""
        self.in_flight -= 1
        if number >= self._first_since:
            self._shrink()

    def on_ignored(self) -> None:
        """The request ended in a way that says nothing about how busy the server is."""
        self.in_flight -= 1

    def reset(self) -> None:
        """Begin small and measure again: the server was away and is back, perhaps another one."""
        self._size = float(self._floor)
        self._shrank_at = float(self._ceiling)
        self._smooth, self._smoothed, self._first_since = 0.0, 0, self._next
        self._least = float("inf")

    def _shrink(self) -> None:
        self._size = self._shrank_at = max(self._floor, SHRINK * self._size)
        self._smooth, self._smoothed, self._first_since = 0.0, 0, self._next
