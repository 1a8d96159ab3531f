"""How long each turn and each search takes: drawn, and a pure function of (seed, trajectory, turn).

Both loops see the same seconds wherever and whenever they ask, so what differs between them is only who waits for
whom. Pure.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Draws:
    """Lognormal latencies. `scale` multiplies every one of them (1: as they are; tests take less).

    trajectories  numbered from 0
    turns         of each: all but the last end in a search
    """

    trajectories: int
    turns: int
    scale: float = 1.0
    decode_median_s: float = 2.0
    decode_sigma: float = 0.8
    search_median_s: float = 0.1
    search_sigma: float = 1.0

    def decode_s(self, seed: int, trajectory: int, turn: int) -> float:
        """Seconds that an engine takes to write this turn."""
        return self._draw("decode", seed, trajectory, turn, self.decode_median_s, self.decode_sigma)

    def search_s(self, seed: int, trajectory: int, turn: int) -> float:
        """Seconds that the search at the end of this turn takes."""
        return self._draw("search", seed, trajectory, turn, self.search_median_s, self.search_sigma)

    def bound_s(self, seed: int) -> float:
        """The critical path: nothing can be done before its longest trajectory is, by its own latencies alone."""
        return max(self._path_s(seed, t) for t in range(self.trajectories))

    def barrier_bound_s(self, seed: int) -> float:
        """The same for the turn-barrier loop: in each turn the slowest of all, then one search for all."""
        slowest = (max(self.decode_s(seed, t, u) for t in range(self.trajectories)) for u in range(self.turns))
        return sum(slowest) + sum(self.search_s(seed, 0, u) for u in range(self.turns - 1))

    def _path_s(self, seed: int, trajectory: int) -> float:
        decode = sum(self.decode_s(seed, trajectory, u) for u in range(self.turns))
        return decode + sum(self.search_s(seed, trajectory, u) for u in range(self.turns - 1))

    def _draw(self, what: str, seed: int, trajectory: int, turn: int, median_s: float, sigma: float) -> float:
        # a text as seed is hashed by sha512: the same on every machine and in every process
        normal = random.Random(f"{what}/{seed}/{trajectory}/{turn}").gauss(0.0, 1.0)
        return self.scale * median_s * math.exp(sigma * normal)
