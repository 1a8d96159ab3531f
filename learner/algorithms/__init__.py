"""The training algorithms: how trajectories become advantages and token losses.

To add one, write `learner/algorithms/<name>.py`, its settings in `learner/config/algorithm.py`, and one line below.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from learner.config.algorithm import (
    CispoSettings,
    DapoSettings,
    DecoupledPpoSettings,
    DistillSettings,
    DppoSettings,
    DrGrpoSettings,
    EmaPgSettings,
    GmpoSettings,
    GpgSettings,
    GrpoSettings,
    GspoSettings,
    PpoSettings,
    ReinforcePpSettings,
    ReinforceSettings,
    RlooSettings,
    SapoSettings,
)
from learner.config.policy import PolicySettings

if TYPE_CHECKING:
    from learner.algorithms.base import Algorithm

REGISTRY: dict[type[PolicySettings], str] = {
    GrpoSettings: "learner.algorithms.grpo:Grpo",
    DrGrpoSettings: "learner.algorithms.grpo:Grpo",
    DapoSettings: "learner.algorithms.dapo:Dapo",
    RlooSettings: "learner.algorithms.rloo:Rloo",
    ReinforceSettings: "learner.algorithms.reinforce:Reinforce",
    ReinforcePpSettings: "learner.algorithms.reinforce_pp:ReinforcePp",
    PpoSettings: "learner.algorithms.ppo:Ppo",
    GspoSettings: "learner.algorithms.gspo:Gspo",
    GmpoSettings: "learner.algorithms.gmpo:Gmpo",
    CispoSettings: "learner.algorithms.cispo:Cispo",
    SapoSettings: "learner.algorithms.sapo:Sapo",
    GpgSettings: "learner.algorithms.gpg:Gpg",
    EmaPgSettings: "learner.algorithms.grpo:Grpo",
    DecoupledPpoSettings: "learner.algorithms.grpo:Grpo",
    DppoSettings: "learner.algorithms.dppo:Dppo",
    DistillSettings: "learner.algorithms.distill:Distill",
}
"""Settings class -> "module:Class"; the class takes the settings."""


def build_algorithm(settings: PolicySettings) -> Algorithm:
    """Instantiate the algorithm that `settings` select. Imports torch."""
    return cast("Algorithm", resolve_name(REGISTRY[type(settings)])(settings))
