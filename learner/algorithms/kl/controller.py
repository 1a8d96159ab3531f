"""What sets the weight of the divergence from step to step (plain Python); its state belongs in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

MAX_ERROR = 0.2
"""Relative error that one update heeds at most (arXiv 1909.08593)."""


class KlController(Protocol):
    """The weight of the divergence."""

    @property
    def coefficient(self) -> float:
        """The weight now."""
        ...

    def update(self, kl: float, batch_size: int) -> None:
        """After a step: `kl` is the batch's mean divergence (nats), `batch_size` its number of trajectories."""
        ...

    def state(self) -> dict[str, float]:
        """Return what `load` restores; goes through JSON unharmed."""
        ...

    def load(self, state: Mapping[str, float]) -> None:
        """Take up a state; raises KeyError when it is another controller's."""
        ...


class FixedKl:
    """The weight stays as configured, also when a checkpoint of another weight is loaded."""

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, kl: float, batch_size: int) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, float]:
        return {}

    def load(self, state: Mapping[str, float]) -> None:
        """Nothing to restore."""


class AdaptiveKl:
    """coefficient *= 1 + clip(kl / target - 1, +-0.2) * batch_size / horizon, after every step.

    Ziegler et al., arXiv 1909.08593, section 2.2; verl's `AdaptiveKLController` (target 0.1, horizon 10000). `target`
    in nats, `horizon` in trajectories. Raises ValueError for settings that could turn the weight negative or stop it.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: float) -> None:
        if coefficient <= 0 or target <= 0 or horizon <= 0:
            raise ValueError(f"coefficient {coefficient}, target {target} and horizon {horizon} must be above 0")
        self._coefficient = coefficient
        self._target = target
        self._horizon = horizon

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, kl: float, batch_size: int) -> None:
        """Raise ValueError for a divergence that is not finite: the weight would never recover from it."""
        if not math.isfinite(kl):
            raise ValueError(f"a divergence of {kl} cannot set its own weight")
        error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        # A batch beyond the horizon counts as one of the horizon's size: the factor stays within 1 +- 0.2.
        self._coefficient *= 1 + error * min(batch_size / self._horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"coefficient": self._coefficient}

    def load(self, state: Mapping[str, float]) -> None:
        self._coefficient = float(state["coefficient"])
