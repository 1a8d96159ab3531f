"""How many tokens each turn has and how long each search takes: drawn, and a pure function of (seed, trajectory, turn).

Every loop that is compared sees the same lengths and seconds wherever and whenever it asks. Pure.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Draws:
    """Lognormal lengths and latencies. `scale` multiplies every time, also that of engines (`scaled`).

    trajectories  numbered from 0
    turns         of each: all but the last end in a search
    turn_tokens   median of a turn's tokens
    """

    trajectories: int
    turns: int
    turn_tokens: int = 64
    scale: float = 1.0
    tokens_sigma: float = 0.5
    least_tokens: int = 16
    most_tokens: int = 400
    search_median_s: float = 0.1
    search_sigma: float = 1.0

    def tokens(self, seed: int, trajectory: int, turn: int) -> int:
        """Tokens of this turn."""
        drawn = self._draw("tokens", seed, trajectory, turn, self.turn_tokens, self.tokens_sigma)
        return min(max(round(drawn), self.least_tokens), self.most_tokens)

    def search_s(self, seed: int, trajectory: int, turn: int) -> float:
        """Seconds that the search at the end of this turn takes."""
        return self.scale * self._draw("search", seed, trajectory, turn, self.search_median_s, self.search_sigma)

    def _draw(self, what: str, seed: int, trajectory: int, turn: int, median: float, sigma: float) -> float:
        # a text as seed is hashed by sha512: the same on every machine and in every process
        normal = random.Random(f"{what}/{seed}/{trajectory}/{turn}").gauss(0.0, 1.0)
        return median * math.exp(sigma * normal)


@dataclass(frozen=True)
class Faults:
    """What happens to the engines during a play, in seconds since its start. Pauses go round: one engine at a time.

    down     engine that is away from `down_s` for `away_s`, and loses its requests and its cache; -1: none
    swaps_s  begins of the weight updates; each engine pauses for `pause_s` and loses its cache
    """

    down: int = -1
    down_s: float = 0.0
    away_s: float = 0.0
    swaps_s: tuple[float, ...] = ()
    pause_s: float = 0.0

    def pauses(self, engine: int) -> list[tuple[float, float]]:
        """(begin, end) of each pause of `engine`."""
        begins = (swap + engine * self.pause_s for swap in self.swaps_s)
        return [(begin, begin + self.pause_s) for begin in begins]

    def lost_s(self, engine: int) -> float:
        """Seconds in which `engine` computes nothing."""
        return self.pause_s * len(self.swaps_s) + (self.away_s if engine == self.down else 0.0)
