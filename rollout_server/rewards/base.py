"""The reward interface: maps a finished trajectory to a number, or to a number per turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from protocol.errors import ForayError
from protocol.messages import Question, Status
from protocol.settings import Settings


@dataclass(frozen=True)
class TurnText:
    """One turn of the policy as text, and the result of its search or tool call.

    policy       text of the policy, without the end-of-sequence token
    observation  the passages as shown to the policy (cut, without the tags): of a search, or of a tool that returns
                 documents. "" if there are none. Other text of a tool is not evidence and not included
    query        the search query; "" without a search (the argument of a tool is not a query)
    tool         the tool called; "" if none
    passage_ids, titles  of the passages that were shown, at least in part, in the order of the index
    tokens       number of tokens that the policy sampled
    finish       "stop" (the policy ended the turn) or "length" (a limit was reached)
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
    """Input of a reward: a finished, valid trajectory as text.

    question  with its gold answers, and its data set and supporting passages in `meta`
    status    ANSWERED, OUT_OF_TURNS or TRUNCATED
    answer    from policy-owned tokens only, as the template's tags delimit it; None if there is none
    turns     of the policy, in order, each with the observation that followed it
    searches  number of searches, without tool calls, which are the turns with a `tool`
    """

    question: Question
    status: Status
    answer: str | None
    turns: tuple[TurnText, ...]
    searches: int

    @property
    def tokens(self) -> int:
        """Number of tokens that the policy sampled, without prompt and observations."""
        return sum(turn.tokens for turn in self.turns)


class RewardError(ForayError):
    """A reward could not be computed (a judge is down, a score is not finite). The trajectory then fails."""


class Reward(Protocol):
    """A named score of one trajectory. `name` is its key in `Trajectory.rewards`. Raises RewardError."""

    name: str

    async def __call__(self, outcome: RewardInput) -> float:
        """Return the score: any finite number, before its weight. Called concurrently, so it must not block.

        Raises RewardError if it cannot be computed. The trajectory then fails: a failure is never a score of 0.
        """


@runtime_checkable
class TurnReward(Protocol):
    """A named score of every turn. Weighted, it is part of `Segment.reward` of that turn. Raises RewardError."""

    name: str

    async def per_turn(self, outcome: RewardInput) -> Sequence[float]:
        """Return one number per turn in `outcome.turns`. The observation of a turn is the result of its own search."""


class RewardSettingsBase(Settings):
    """Base of all reward settings. A member of the union adds its `type` and its options."""

    type: str
    weight: float = 1.0
    """Weight in the trajectory's reward; 0 only records the score."""
    sources: tuple[str, ...] = ()
    """Score only questions of these data sets (docs/data.md). Empty: all questions."""

    @property
    def key(self) -> str:
        """Name in `Trajectory.rewards`, unique within a configuration."""
        return self.type

    @property
    def reads_passages(self) -> bool:
        """Whether it reads the passages that searches returned."""
        return False


class WithoutOptions:
    """A reward without options other than its weight."""

    def __init__(self, settings: RewardSettingsBase | None = None) -> None:
        """Ignore `settings`, which `build_reward` passes to every reward."""
