"""Per turn: whether it is <think>..</think> and then one <search>..</search> or <answer>..</answer>, or one call of an
enabled tool, nothing else.

As in `format`, a tag of another kind makes a turn ill-formed, an observation's tag (<information>, <result>) included,
and what follows the closing tag of the action is ignored. By default an ill-formed turn costs and a well-formed one
earns nothing: were it the other way round, a trajectory would earn more by taking more turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollout_server.reward.base import Outcome, TurnReward, WeightedReward
from rollout_server.reward.format import call_shape, turn_shape
from rollout_server.reward.io import Io

_TAGS = "think|search|information|result|answer"
_SHAPES = (turn_shape("search", _TAGS), turn_shape("answer", _TAGS))


class TurnFormat:
    """`well` or `ill` for each turn."""

    name = "turn_format"

    def __init__(self, settings: TurnFormatSettings) -> None:
        self._well, self._ill = settings.well, settings.ill

    async def per_turn(self, outcome: Outcome) -> Sequence[float]:
        shapes = ((call_shape(turn.tool, _TAGS),) if turn.tool else _SHAPES for turn in outcome.turns)
        formed = (any(s.match(turn.policy) for s in each) for each, turn in zip(shapes, outcome.turns, strict=True))
        return [self._well if good else self._ill for good in formed]


class TurnFormatSettings(WeightedReward):
    """An ill-formed turn costs."""

    type: Literal["turn_format"] = "turn_format"
    well: float = 0.0
    """Score of a well-formed turn. Above 0, more turns earn more."""
    ill: float = -1.0
    """Score of any other turn."""

    def build(self, io: Io) -> TurnReward:
        return TurnFormat(self)
