"""Base of the faults. Each kind is a small class in faults_*.py; `KINDS` (attacks.py) lists them.

inject    cause the fault; False: not possible at this moment (nothing was changed)
tick      called until it is over, for faults with stages
heal      undo it, if it does not end by itself
happened  evidence from outside the driver that it happened: an exit status, a state in /proc, a counter of the proxy
          or of Redis, a line in a log; "" while there is none. A kind that is never witnessed fails the harness.
recovery  paths (recoveries.py), at least one of which must be taken after such a fault was witnessed
lacking   what this machine lacks for it; "" if nothing. Such a kind is left out, with a line that says so
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ring import Ring

AFTER_S = 20.0
"""Seconds after a fault in which it still explains an end of the learner."""


@dataclass
class Fault(ABC):
    """One fault. `rng`, seeded by the schedule, decides its details; `seconds`: its duration."""

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
    """Time after its end for the evidence to appear, in seconds."""
    lengths: ClassVar[Sequence[float]] = ()
    """Durations instead of `lasts`: each with each target once, in an order of the seed's own, then again."""
    late_s: ClassVar[float] = 0.0
    """Minimum time for which it waits for its target, in seconds (battle.py)."""
    lingers_s: ClassVar[float] = 0.0
    """Maximum time beyond `seconds` for which it lasts until it is witnessed, in seconds."""
    exclusive: ClassVar[bool] = False
    """No other fault is injected meanwhile, and the time does not count for those that last."""

    @property
    def held(self) -> frozenset[str]:
        """Targets that no other fault may use meanwhile."""
        return frozenset({self.target})

    @property
    def sick(self) -> frozenset[str]:
        """Engines that are not healthy meanwhile."""
        return frozenset(name for name in self.held if name.startswith("engine"))

    @classmethod
    def lacking(cls) -> str:
        return ""

    def excuse_learner(self) -> None:
        """Expect an end of the learner while this lasts, and AFTER_S longer."""
        self.ring.excuse("learner", self.name, self.seconds + self.lingers_s + AFTER_S)

    @abstractmethod
    def inject(self) -> bool: ...

    def tick(self) -> None:  # noqa: B027 - most have no stages
        """Nothing, for most."""

    @property
    def over(self) -> bool:
        """Whether it may be healed early."""
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
