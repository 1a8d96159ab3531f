"""The training algorithms: how trajectories become advantages and token losses.

To add an algorithm, write `learner/algorithms/<name>.py`, its settings and one line in `learner/config/algorithm.py`.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from learner.config.algorithm import REGISTRY
from learner.config.policy import PolicySettings

if TYPE_CHECKING:
    from learner.algorithms.base import Algorithm


def build_algorithm(settings: PolicySettings) -> Algorithm:
    """Return an instance of the algorithm that `settings` select. Imports torch."""
    return cast("Algorithm", resolve_name(REGISTRY[type(settings)])(settings))
