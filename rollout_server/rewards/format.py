"""Search-R1's outcome-and-format reward (`qa_em_format.py`, settings of its v0.3 scripts), on policy-owned text only.

It includes exact match, so it is usually the only reward, with weight 1:

    exact match, well-formed    score                      1.0
    exact match, ill-formed     score - structure          0.8
    wrong, well-formed          structure (+ retrieval if a gold answer was in an observation)   0.2
    wrong, ill-formed           final                      0.1
    no answer                   0

Well-formed: every turn but the last is <think>..</think><search>..</search>, the last is <think>..</think>
<answer>..</answer>, with white space between and no other tag: an <information> written by the policy is ill-formed.
With `think: optional` the thought may be left out, for templates that ask for none (`search_r1_fast`).
Text after a turn's closing tag is ignored: a token may extend beyond the end of the turn. A tool call counts like a
search.

Search-R1 also reads the prompt and the documents. So it scores "no answer" as the prompt's example "Beijing", and
counts an answer inside a document as the policy's. Neither can happen here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from pydantic import Field

from rollout_server.rewards.base import RewardInput, RewardSettingsBase, TurnText
from rollout_server.rewards.text_match import ExactMatch, covers

Think = Literal["required", "optional"]
_TAGS = "think|search|information|answer"


@lru_cache
def turn_shape(action: str, tags: str, think: Think = "required") -> re.Pattern[str]:
    """Return the pattern <think>..</think> <action>..</action> without any of `tags`, or the action's, inside."""
    inside = rf"(?:(?!</?(?:{tags}|{action})>).)*"
    thought = rf"(?:<think>{inside}</think>){'?' if think == 'optional' else ''}"
    return re.compile(rf"\s*{thought}\s*<{action}>{inside}</{action}>", re.DOTALL)


def well_formed(turns: tuple[TurnText, ...], think: Think = "required") -> bool:
    """Return whether the policy's turns follow the protocol, as defined in the module docstring."""
    if not turns:
        return False
    actions = [*(turn.tool or "search" for turn in turns[:-1]), "answer"]
    shapes = (turn_shape(action, _TAGS, think) for action in actions)
    return all(shape.match(turn.policy) for shape, turn in zip(shapes, turns, strict=True))


class FormatReward:
    """Scores a trajectory by the table in the module docstring."""

    name = "format"

    def __init__(self, settings: FormatSettings) -> None:
        self._settings = settings
        self._exact = ExactMatch()

    async def __call__(self, outcome: RewardInput) -> float:
        symbols = self._settings
        if outcome.answer is None:
            return 0.0
        formed = well_formed(outcome.turns, symbols.think)
        if await self._exact(outcome):
            return symbols.score if formed else symbols.score - symbols.structure
        if not formed:
            return symbols.final
        found = any(covers(turn.observation, outcome.question.answers) for turn in outcome.turns)
        return symbols.structure + (symbols.retrieval if found else 0.0)


class ThoughtSettings(RewardSettingsBase):
    """Settings of rewards for well-formed turns."""

    think: Think = "required"
    """Whether a well-formed turn begins with a thought."""


class FormatSettings(ThoughtSettings):
    """Exact match and protocol in one number (Search-R1 v0.3)."""

    type: Literal["format"] = "format"
    score: float = 1.0
    """Score of a correct answer in a well-formed trajectory."""
    structure: float = Field(default=0.2, ge=0)
    """Part of the score for being well-formed."""
    final: float = Field(default=0.1, ge=0)
    """Score of a wrong answer in an ill-formed trajectory."""
    retrieval: float = Field(default=0.0, ge=0)
    """Added to a wrong answer in a well-formed trajectory, if an observation contained a gold answer."""

    @property
    def reads_passages(self) -> bool:
        return self.retrieval > 0


_TURN_TAGS = "think|search|information|result|answer"


class TurnFormat:
    """Scores each turn: `well` if it is well-formed, else `ill`.

    Well-formed: <think>..</think>, then one <search>..</search>, <answer>..</answer> or call of an enabled tool, and
    nothing else.

    As in `FormatReward`, any other tag makes a turn ill-formed, including tags of observations (<information>,
    <result>), and text after the closing tag of the action is ignored. By default ill-formed turns are penalised;
    rewarding well-formed ones would reward more turns.
    """

    name = "turn_format"

    def __init__(self, settings: TurnFormatSettings) -> None:
        self._settings = settings

    async def per_turn(self, outcome: RewardInput) -> Sequence[float]:
        return [self._settings.well if self._formed(turn) else self._settings.ill for turn in outcome.turns]

    def _formed(self, turn: TurnText) -> bool:
        actions = (turn.tool,) if turn.tool else ("search", "answer")
        return any(turn_shape(action, _TURN_TAGS, self._settings.think).match(turn.policy) for action in actions)


class TurnFormatSettings(ThoughtSettings):
    """Penalises ill-formed turns."""

    type: Literal["turn_format"] = "turn_format"
    well: float = 0.0
    """Score of a well-formed turn. A value above 0 rewards more turns."""
    ill: float = -1.0
    """Score of any other turn."""
