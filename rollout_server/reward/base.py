"""The seam to rewards: facts of one finished trajectory in, a number out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.errors import ForayError
from protocol.messages import Question, Status


@dataclass(frozen=True)
class TurnText:
    """One turn as text: what the policy wrote and, when it searched, what came back, without the tags around it."""

    policy: str
    observation: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a reward may look at. `answer` was read from policy-owned tokens only; None when it gave none."""

    question: Question
    status: Status
    answer: str | None
    turns: tuple[TurnText, ...]
    searches: int


class RewardError(ForayError):
    """A reward could not be computed (a judge is down, a score is not finite): the trajectory fails, it gets no 0."""


class Reward(Protocol):
    """A named score of one trajectory. `name` is its key in `Trajectory.rewards`. Raises RewardError."""

    name: str

    async def __call__(self, outcome: Outcome) -> float: ...
