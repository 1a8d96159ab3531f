"""Controllers of the KL coefficient (plain Python); their state is part of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

MAX_ERROR = 0.2
"""Bound on the relative error used in one update (arXiv 1909.08593)."""


class KlController(Protocol):
    """Sets the KL coefficient."""

    @property
    def coefficient(self) -> float:
        """Return the current coefficient."""

    def update(self, kl: float, batch_size: int) -> None:
        """Update after a step: `kl` is the batch's mean divergence (nats), `batch_size` its number of trajectories."""

    def state(self) -> dict[str, float]:
        """Return what `load` restores, JSON-serialisable."""

    def load(self, state: Mapping[str, float]) -> None:
        """Restore a state. Raises KeyError if it is another controller's."""


class FixedKl:
    """Keeps the configured coefficient, even if a checkpoint with another one is loaded."""

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, kl: float, batch_size: int) -> None:
        """Do nothing: the coefficient is fixed."""

    def state(self) -> dict[str, float]:
        return {}

    def load(self, state: Mapping[str, float]) -> None:
        """Do nothing: there is no state."""


class AdaptiveKl:
    """coefficient *= 1 + clip(kl / target - 1, +-0.2) * batch_size / horizon, after every step.

    Ziegler et al., arXiv 1909.08593, section 2.2; verl's `AdaptiveKLController` (target 0.1, horizon 10000). `target`
    is in nats, `horizon` in trajectories. Raises ValueError for settings that could make the coefficient negative or
    freeze it.
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
        """Apply the rule. Raises ValueError for a non-finite divergence: the coefficient would never recover."""
        if not math.isfinite(kl):
            raise ValueError(f"the KL coefficient cannot be updated from a divergence of {kl}")
        error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        # A batch larger than the horizon counts as the horizon: the factor stays within 1 +- 0.2.
        self._coefficient *= 1 + error * min(batch_size / self._horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"coefficient": self._coefficient}

    def load(self, state: Mapping[str, float]) -> None:
        self._coefficient = float(state["coefficient"])
