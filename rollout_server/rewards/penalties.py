"""Penalties for long trajectories, repeated queries, many searches, and for no search or no answer. Never above 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from rollout_server.rewards.base import RewardInput, RewardSettingsBase, WithoutOptions
from rollout_server.rewards.text_match import normalise


class LengthPenalty:
    """Penalises the number of tokens that the policy sampled (not observations), from 0 to -1.

    overlong      0 up to max_tokens - buffer, then linear down to -1 at max_tokens
                  (DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13)
    proportional  -tokens / max_tokens

    Both are -1 beyond max_tokens: without that limit one very long trajectory would outweigh its whole group.
    """

    name = "length_penalty"

    def __init__(self, settings: LengthPenaltySettings) -> None:
        self._most = settings.max_tokens
        self._ramp = settings.buffer if settings.shape == "overlong" else settings.max_tokens

    async def __call__(self, outcome: RewardInput) -> float:
        # proportional is overlong with buffer = max_tokens
        over = outcome.tokens - (self._most - self._ramp)
        return 0.0 - min(1.0, max(0, over) / self._ramp)


class LengthPenaltySettings(RewardSettingsBase):
    """Penalty for long trajectories, between -1 and 0."""

    type: Literal["length_penalty"] = "length_penalty"
    shape: Literal["overlong", "proportional"] = "overlong"
    """overlong: penalise only the last `buffer` tokens (DAPO). proportional: penalise every token equally."""
    max_tokens: int = Field(default=2048, ge=1)
    """Number of sampled tokens at which the penalty reaches -1."""
    buffer: int = Field(default=512, ge=1)
    """Number of tokens before `max_tokens` over which the penalty grows (overlong only)."""

    @model_validator(mode="after")
    def _fits(self) -> LengthPenaltySettings:
        if self.shape == "overlong" and self.buffer > self.max_tokens:
            raise ValueError("buffer must be at most max_tokens")
        return self


class RepeatedQuery(WithoutOptions):
    """Scores -1 for each turn that repeats a query of an earlier turn, else 0.

    Queries are compared after Search-R1's normalisation (case, ASCII punctuation, articles, white space).
    """

    name = "repeated_query"

    async def per_turn(self, outcome: RewardInput) -> Sequence[float]:
        asked: set[str] = set()
        earned = []
        for turn in outcome.turns:
            # a query with only punctuation is compared unchanged
            query = normalise(turn.query) or turn.query
            earned.append(-1.0 if query and query in asked else 0.0)
            asked.add(query)
        return earned


class RepeatedQuerySettings(RewardSettingsBase):
    """Penalty of -1 for every search that repeats an earlier query."""

    type: Literal["repeated_query"] = "repeated_query"


class SearchCost:
    """Scores -min(cap, each * (searches - free)), never above 0.

    Failed searches count too. Tool calls do not; use `max_calls` of the tool to limit them.
    """

    name = "search_cost"

    def __init__(self, settings: SearchCostSettings) -> None:
        self._settings = settings

    async def __call__(self, outcome: RewardInput) -> float:
        costs = self._settings
        return 0.0 - min(costs.cap, costs.each * max(0, outcome.searches - costs.free))


class SearchCostSettings(RewardSettingsBase):
    """Penalty for each search beyond the free ones, at most 0."""

    type: Literal["search_cost"] = "search_cost"
    each: float = Field(default=0.1, ge=0)
    """Penalty per search."""
    free: int = Field(default=1, ge=0)
    """Number of searches without a penalty."""
    cap: float = Field(default=1.0, ge=0)
    """Maximum penalty of a trajectory."""


class MissingAction:
    """Scores -`search` without a search and -`answer` without an answer: of Search-R1++'s reward (arXiv 2602.19526),
    what it adds to F1. With F1 alone a policy stops to answer where it expects to be wrong.

    Failed searches count as searches: the policy asked.
    """

    name = "missing_action"

    def __init__(self, settings: MissingActionSettings) -> None:
        self._settings = settings

    async def __call__(self, outcome: RewardInput) -> float:
        costs = self._settings
        if not outcome.turns:  # the policy was not asked
            return 0.0
        searched, answered = outcome.searches > 0, outcome.answer is not None
        return 0.0 - (0.0 if searched else costs.search) - (0.0 if answered else costs.answer)


class MissingActionSettings(RewardSettingsBase):
    """Penalty for a trajectory without a search, and for one without an answer, at most 0."""

    type: Literal["missing_action"] = "missing_action"
    search: float = Field(default=0.1, ge=0)
    """Penalty without a search."""
    answer: float = Field(default=0.1, ge=0)
    """Penalty without an answer."""
