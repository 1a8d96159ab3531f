"""A soft price on length, in tokens that the policy sampled: what it read is not its doing. From -1 to 0.

    overlong      0 up to max_tokens - buffer, then down in a straight line to -1 at max_tokens
                  (DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13)
    proportional  -tokens / max_tokens

Both stay at -1 beyond max_tokens: without that cap one endless trajectory outweighs its whole group.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollout_server.reward.base import Outcome, Reward, WeightedReward
from rollout_server.reward.io import Io


class LengthPenalty:
    """See the module."""

    name = "length_penalty"

    def __init__(self, settings: LengthPenaltySettings) -> None:
        self._most = settings.max_tokens
        self._ramp = settings.buffer if settings.shape == "overlong" else settings.max_tokens

    async def __call__(self, outcome: Outcome) -> float:
        # proportional is overlong with a buffer as long as everything
        over = outcome.tokens - (self._most - self._ramp)
        return 0.0 - min(1.0, max(0, over) / self._ramp)


class LengthPenaltySettings(WeightedReward):
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

    def build(self, io: Io) -> Reward:
        return LengthPenalty(self)
