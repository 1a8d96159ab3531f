"""The seam to rewards: facts of one finished trajectory in, a number out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Question, Status


@dataclass(frozen=True)
class TurnText:
    """One turn as text: what the policy wrote and, when it searched, what came back."""

    policy: str
    observation: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a reward may look at. `answer` was read from policy-owned tokens only; "" when there is none."""

    question: Question
    status: Status
    answer: str
    turns: tuple[TurnText, ...]
    searches: int


class Reward(Protocol):
    """A named score of one trajectory. `name` is its key in `Trajectory.rewards`."""

    name: str

    async def __call__(self, outcome: Outcome) -> float: ...
