"""The parameters of a schedule: sizes, speeds and faults, all drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sim.network import Trouble

KINDS = (
    "learner killed",
    "learner killed at the disk",
    "learner asked to stop",
    "learner stopped and woken",
    "second learner",
    "second learner takes over",
    "rollouts killed",
    "rollouts stopped and woken",
    "rollouts asked to stop",
    "partition",
    "redis away",
    "redis wiped",
    "redis rolled back",
    "redis full",
    "redis stopped",
    "clock forward",
    "clock back",
    "stranger's entry",
    "task deleted",
    "seqs asked for again",
)


AWAY_AT_S = 3.0


@dataclass
class Knobs:
    """One schedule. Seconds are virtual.

    memory  0, or the number of groups that a Redis with a limit can hold without blocking rollouts: at least one batch
    faults  kind -> how many, at random moments of the first `storm_s` seconds
    away_s  from second AWAY_AT_S on, Redis refuses every connection for so long; 0: it does not
    """

    steps: int = 5
    groups_per_step: int = 2
    max_lag: int = 1
    checkpoint_every: int = 2
    on_stale: str = "mask"
    filter: bool = False
    lease_s: float = 3.0
    reconcile_s: float = 2.0
    idle_s: float = 2.0
    rollout_s: float = 0.5
    step_s: float = 0.2
    straggler: float = 0.0
    reject: float = 0.0
    broken: float = 0.0
    same_reward: float = 0.0
    corrupt: float = 0.0
    nonfinite: float = 0.0
    disk: float = 0.0
    same_host: bool = False
    memory: int = 0
    storm_s: float = 12.0
    away_s: float = 0.0
    trouble: Trouble = field(default_factory=Trouble)
    faults: dict[str, int] = field(default_factory=dict)

    def tighten(self, more: int) -> None:
        """Redis holds one batch and `more` groups, and only a learner that is short of groups writes checkpoints."""
        self.memory, self.checkpoint_every = self.groups_per_step + more, 1000


def draw(seed: int) -> Knobs:
    """The schedule of `seed`."""
    rng = random.Random(f"knobs {seed}")

    def sometimes(most: float, chance: float = 0.4) -> float:
        return rng.uniform(0, most) if rng.random() < chance else 0.0

    knobs = Knobs(
        steps=rng.choice((3, 4, 5, 6, 12)),
        groups_per_step=rng.choice((1, 2, 2, 3)),
        max_lag=rng.choice((0, 1, 1, 2)),
        checkpoint_every=rng.choice((1, 2, 2, 3)),
        on_stale=rng.choice(("mask", "drop")),
        filter=rng.random() < 0.3,
        lease_s=rng.choice((1.5, 3.0, 5.0)),
        reconcile_s=rng.choice((1.0, 2.0, 4.0)),
        idle_s=rng.choice((1.0, 2.0, 4.0)),
        rollout_s=rng.choice((0.1, 0.5, 1.0)),
        step_s=rng.choice((0.05, 0.2, 0.8)),
        straggler=sometimes(0.15),
        reject=sometimes(0.2),
        broken=sometimes(0.05, 0.2),
        same_reward=sometimes(0.4),
        corrupt=sometimes(0.15),
        nonfinite=sometimes(0.1, 0.2),
        disk=sometimes(0.05, 0.2),
        same_host=rng.random() < 0.5,
        storm_s=rng.choice((3.0, 6.0, 6.0, 10.0)),
        trouble=Trouble(sometimes(0.03), sometimes(0.05), sometimes(0.03), sometimes(0.05)),
    )
    for kind in rng.choices(KINDS, k=rng.choice((0, 1, 2, 3, 4, 6))):
        knobs.faults[kind] = knobs.faults.get(kind, 0) + 1
    if "clock back" in knobs.faults:
        # Entries are lost, then the clock is set back before them: Redis gives their ids to other entries. The
        # learner cannot tell them apart; what it misses is generated again, and the token accounting shows it.
        knobs.faults.pop("redis rolled back", None)
        knobs.faults.pop("redis wiped", None)
    if rng.random() < 0.3:
        knobs.tighten(rng.choice((0, 1, 2)))
    return knobs
