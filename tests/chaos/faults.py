"""What a fault is. Each kind is a small class in faults_*.py; `KINDS` (attacks.py) lists them.

inject    makes it happen; False: it cannot be done at this moment (nothing was changed)
tick      called until it is over, for faults that have stages
heal      undoes it, where it does not end by itself
happened  evidence that it did happen, from outside the driver: an exit status, a state in /proc, a counter of the
          proxy or of Redis, a line in a log; "" while there is none. A kind that is never witnessed fails the harness.
recovery  paths (recoveries.py) of which at least one must have been taken once such a fault was witnessed
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ring import Ring


@dataclass
class Fault(ABC):
    """One fault to be. `rng` decides its details, and was seeded by the schedule; `seconds`: how long it lasts."""

    ring: Ring
    target: str
    seconds: float
    rng: random.Random

    name: ClassVar[str]
    weight: ClassVar[float] = 1.0
    targets: ClassVar[Sequence[str]] = ("learner",)
    lasts: ClassVar[tuple[float, float]] = (0.0, 0.0)
    recovery: ClassVar[Sequence[str]] = ()
    patience_s: ClassVar[float] = 20.0
    """How long after its end the evidence may take to show."""

    @property
    def held(self) -> frozenset[str]:
        """What no other fault may have meanwhile."""
        return frozenset({self.target})

    @abstractmethod
    def inject(self) -> bool: ...

    def tick(self) -> None:  # noqa: B027 - most have no stages
        """Nothing, for most."""

    @property
    def over(self) -> bool:
        """Whether it may be healed before its time."""
        return False

    def heal(self) -> None:  # noqa: B027 - most end by themselves
        """Nothing, for most."""

    @abstractmethod
    def happened(self) -> str: ...


def state_of(pid: int) -> str:
    """R, S, D, T (stopped), Z; "" when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
