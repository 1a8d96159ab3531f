"""What a person reads while it trains: one line a step, with who waits for whom in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import TrajectoryGroup

WORDS = {
    "data": "learner waits for rollouts",
    "compute": "rollouts wait for the learner",
    "publish": "publishing weights",
    "checkpoint": "writing a checkpoint",
    "redis": "waiting for Redis",
}
BALANCED = 0.5
"""Below this share of the step, no single cause is called the bottleneck."""


@dataclass(frozen=True)
class StepFacts:
    """What a step's line is made of. seconds: by cause, of this step alone; total_s: of the whole step.
    length, searches: sampled tokens and searches per trajectory."""

    step: int
    steps: int
    reward: float
    em: float
    lag_mean: float
    lag_max: float
    sampled: int
    trained: int
    total_s: float
    seconds: dict[str, float]
    length: float = 0.0
    searches: float = 0.0

    @property
    def bottleneck(self) -> str:
        """Who waits for whom, in words."""
        cause = max(self.seconds, key=lambda name: self.seconds[name])
        share = self.seconds[cause] / max(self.total_s, 1e-9)
        return f"{WORDS[cause]} ({share:.0%})" if share >= BALANCED else "balanced"

    def line(self) -> str:
        """The line for the terminal."""
        rate = 1 / max(self.total_s, 1e-9)
        return (
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}"
            f"  reward {self.reward:.3f}  em {self.em:.3f}  lag {self.lag_mean:.1f}/{self.lag_max:.0f}"
            f"  generated {_short(self.sampled * rate)} tok/s  trained {_short(self.trained * rate)} tok/s"
            f"  {self.total_s:.1f} s  {self.bottleneck}"
        )


def mean_reward(groups: Sequence[TrajectoryGroup], name: str = "") -> float:
    """Mean over the trajectories that vote of the reward, or of one of its parts; 0 when there is none."""
    voting = [t for g in groups for t in g.trajectories if t.status.votes]
    values = [t.rewards.get(name, 0.0) if name else t.reward for t in voting]
    return sum(values) / len(values) if values else 0.0


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
