"""The schedule of faults, a pure function of the seed: faults, targets, times and details.

The results vary (processes race), so to reproduce a failure run its seed several times.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from attacks import KINDS
from faults import Fault

GAP_S = (0.8, 2.6)
"""Between one fault and the next."""
FIRST_S = 1.0


@dataclass(frozen=True)
class Planned:
    """One fault. at: seconds after the beginning; seconds: how long it lasts; salt: seed of its details."""

    at: float
    kind: str
    target: str
    seconds: float
    salt: int

    @property
    def line(self) -> str:
        """For people."""
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:7.2f}  {self.kind} {self.target}{lasting}"


def make_schedule(
    seed: int, seconds: float, *, kinds: Iterable[str] = KINDS, gap_s: tuple[float, float] = GAP_S
) -> list[Planned]:
    """Faults for `seconds`. The first ones are one of each kind and target of a kill, in an order of the seed's own, so
    that a run of some length has them all; the rest are drawn by weight. After an exclusive fault is a pause as long.
    """
    rng = random.Random(f"chaos {seed}")
    chosen = [KINDS[name] for name in kinds]
    once = [kind for kind in chosen for _ in range(len(kind.targets) if kind.name == "kill" else 1)]
    rng.shuffle(once)
    kills = iter(rng.sample(list(KINDS["kill"].targets), len(KINDS["kill"].targets)))
    decks = {kind.name: deck(seed, kind) for kind in chosen if kind.lengths}
    planned: list[Planned] = []
    at = FIRST_S
    while at < seconds:
        first = len(planned) < len(once)
        kind = once[len(planned)] if first else rng.choices(chosen, [k.weight for k in chosen])[0]
        target = next(kills) if first and kind.name == "kill" else rng.choice(list(kind.targets))
        lasting = rng.uniform(*kind.lasts)
        if kind.lengths:
            target, lasting = next(decks[kind.name])
        planned.append(Planned(round(at, 2), kind.name, target, round(lasting, 2), rng.randrange(1 << 30)))
        at += rng.uniform(*gap_s) + (lasting if kind.exclusive else 0.0)
    return planned


def deck(seed: int, kind: type[Fault]) -> Iterator[tuple[str, float]]:
    """Yield every target with every duration once, shuffled, then again. Short exclusive faults come first."""
    rng = random.Random(f"{kind.name} {seed}")
    while True:
        pairs = list(product(kind.targets, kind.lengths))
        rng.shuffle(pairs)
        yield from sorted(pairs, key=lambda pair: pair[1]) if kind.exclusive else pairs


def render(planned: Sequence[Planned]) -> str:
    """The schedule as a table."""
    return "\n".join(item.line for item in planned)
