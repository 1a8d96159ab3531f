"""Penalties on behaviour: long trajectories, repeated queries, many searches. Never above 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from rollout_server.rewards.base import RewardInput, RewardSettingsBase, WithoutOptions
from rollout_server.rewards.text_match import normalise


class LengthPenalty:
    """Scores length in tokens that the policy sampled, from -1 to 0: what it read is not its doing.

    overlong      0 up to max_tokens - buffer, then down in a straight line to -1 at max_tokens
                  (DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13)
    proportional  -tokens / max_tokens

    Both stay at -1 beyond max_tokens: without that cap one endless trajectory outweighs its whole group.
    """

    name = "length_penalty"

    def __init__(self, settings: LengthPenaltySettings) -> None:
        self._most = settings.max_tokens
        self._ramp = settings.buffer if settings.shape == "overlong" else settings.max_tokens

    async def __call__(self, outcome: RewardInput) -> float:
        # proportional is overlong with a buffer as long as everything
        over = outcome.tokens - (self._most - self._ramp)
        return 0.0 - min(1.0, max(0, over) / self._ramp)


class LengthPenaltySettings(RewardSettingsBase):
    """Long trajectories cost; the score is between -1 and 0."""

    type: Literal["length_penalty"] = "length_penalty"
    shape: Literal["overlong", "proportional"] = "overlong"
    """overlong: only the last `buffer` tokens cost (DAPO). proportional: every token costs the same."""
    max_tokens: int = Field(default=2048, ge=1)
    """Sampled tokens of a trajectory at which it costs 1."""
    buffer: int = Field(default=512, ge=1)
    """Of them, those that cost (overlong only)."""

    @model_validator(mode="after")
    def _fits(self) -> LengthPenaltySettings:
        if self.shape == "overlong" and self.buffer > self.max_tokens:
            raise ValueError("buffer is longer than max_tokens")
        return self


class RepeatedQuery(WithoutOptions):
    """-1 for each turn whose query an earlier turn had, else 0.

    Queries are compared after Search-R1's normalisation (case, ASCII punctuation, articles, blanks).
    """

    name = "repeated_query"

    async def per_turn(self, outcome: RewardInput) -> Sequence[float]:
        asked: set[str] = set()
        earned = []
        for turn in outcome.turns:
            # a query of nothing but punctuation is compared as it stands
            query = normalise(turn.query) or turn.query
            earned.append(-1.0 if query and query in asked else 0.0)
            asked.add(query)
        return earned


class RepeatedQuerySettings(RewardSettingsBase):
    """-1 for every search that repeats an earlier one."""

    type: Literal["repeated_query"] = "repeated_query"


class SearchCost:
    """Scores -min(cap, each * (searches - free)), never above 0.

    A search that failed counts too. Calls of tools cost nothing here: a setting of each tool bounds them.
    """

    name = "search_cost"

    def __init__(self, settings: SearchCostSettings) -> None:
        self._settings = settings

    async def __call__(self, outcome: RewardInput) -> float:
        costs = self._settings
        return 0.0 - min(costs.cap, costs.each * max(0, outcome.searches - costs.free))


class SearchCostSettings(RewardSettingsBase):
    """Each search beyond the free ones costs; the score is 0 or below."""

    type: Literal["search_cost"] = "search_cost"
    each: float = Field(default=0.1, ge=0)
    """Cost of one search."""
    free: int = Field(default=1, ge=0)
    """Searches that cost nothing."""
    cap: float = Field(default=1.0, ge=0)
    """Most that a trajectory's searches cost."""
