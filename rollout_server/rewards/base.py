"""The interface to rewards: facts of one finished trajectory in, a number out (or a number for each of its turns)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from protocol.errors import ForayError
from protocol.messages import Question, Status
from protocol.settings import Settings


@dataclass(frozen=True)
class TurnText:
    """One turn of the policy as text and, when it searched or called a tool, what came back.

    policy       what the policy wrote, without the end-of-sequence token
    observation  the passages that it was then shown, without the tags around them, cut as they were shown: of a search,
                 or of a tool that brings documents. "" when it did neither. Other text of a tool is no evidence
                 and is not here
    query        what it searched for, "" when it did not: a tool's argument is no query
    tool         the tool that it called, "" when it called none
    passage_ids, titles  of the passages that stood in the observation, at least in part: in the order of the index
    tokens       number of tokens that the policy sampled
    finish       "stop" (it ended the turn itself) or "length" (a limit did)
    """

    policy: str
    observation: str = ""
    query: str = ""
    passage_ids: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    tokens: int = 0
    finish: str = "stop"
    tool: str = ""


@dataclass(frozen=True)
class RewardInput:
    """What a reward may look at. `answer` was read from policy-owned tokens only; None when it gave none.

    searches  counts searches only: calls of tools are the turns with a `tool`
    """

    question: Question
    status: Status
    answer: str | None
    turns: tuple[TurnText, ...]
    searches: int

    @property
    def tokens(self) -> int:
        """Tokens that the policy sampled: prompt and observations are not its doing."""
        return sum(turn.tokens for turn in self.turns)


class RewardError(ForayError):
    """A reward could not be computed (a judge is down, a score is not finite): the trajectory fails, it gets no 0."""


class Reward(Protocol):
    """A named score of one trajectory. `name` is its key in `Trajectory.rewards`. Raises RewardError."""

    name: str

    async def __call__(self, outcome: RewardInput) -> float: ...


@runtime_checkable
class TurnReward(Protocol):
    """A named score of every turn: by weight, it becomes part of `Segment.reward` of that turn. Raises RewardError."""

    name: str

    async def per_turn(self, outcome: RewardInput) -> Sequence[float]:
        """One number for each of `outcome.turns`. A turn is scored with what its own search brought."""
        ...


class RewardSettingsBase(Settings):
    """What the settings of every reward have: a member of the union adds its `type` and what else it needs."""

    type: str
    weight: float = 1.0
    """Factor in the trajectory's reward; 0 is measured only."""

    @property
    def key(self) -> str:
        """Name in `Trajectory.rewards`; no two rewards of an episode may share it."""
        return self.type


class WithoutOptions:
    """A reward whose settings hold nothing but its weight."""

    def __init__(self, settings: RewardSettingsBase | None = None) -> None:
        """`settings` is what `build_reward` passes to every reward."""
