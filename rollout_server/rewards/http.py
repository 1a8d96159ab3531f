"""A reward computed by a service of yours: it gets the outcome as JSON and answers `{"reward": number}`.

    POST url   {"outcome": {"question": {"id", "text", "answers", "meta"}, "status", "answer": text or null, "searches",
                "turns": [{"policy", "observation", "query", "tool", "passage_ids", "titles", "tokens", "finish"}]}}

The fields are those of `RewardInput` and `TurnText`; `read_outcome` makes them of the JSON again. Failures are retried
within the deadline, and finally fail the trajectory: they are never a score.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field

from rollout_server.rewards.base import RewardInput
from rollout_server.rewards.remote import JsonEndpoint, RewardServiceSettings
from rollout_server.rewards.resources import RewardResources


def outcome_json(outcome: RewardInput) -> dict[str, Any]:
    """Return an outcome as the body of a request."""
    return {"outcome": msgspec.to_builtins(outcome)}


def read_outcome(document: Any) -> RewardInput:
    """Return the outcome in a decoded body. Raises KeyError or msgspec.ValidationError."""
    return msgspec.convert(document["outcome"], RewardInput)


class HttpReward:
    """Asks the service for each trajectory."""

    def __init__(self, settings: HttpRewardSettings, resources: RewardResources) -> None:
        self.name = settings.key
        self._endpoint = JsonEndpoint(settings, "", resources)

    async def __call__(self, outcome: RewardInput) -> float:
        return await self._endpoint.ask(outcome_json(outcome), _score)


def _score(reply: Any) -> float:
    score = reply["reward"]
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"the reward is no number: {score!r}")
    return float(score)


class HttpRewardSettings(RewardServiceSettings):
    """A reward computed by a service of yours."""

    type: Literal["http"] = "http"
    name: str = Field(default="http", min_length=1)
    """Key in `Trajectory.rewards`."""

    @property
    def key(self) -> str:
        """See base."""
        return self.name
