"""Rewards: every kind by its settings, and the one place where they are built."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

from pydantic import Field

from rollout_server.rewards.base import Reward, TurnReward, WeightedReward
from rollout_server.rewards.custom import CustomSettings
from rollout_server.rewards.format import FormatSettings, TurnFormatSettings
from rollout_server.rewards.judge import JudgeSettings
from rollout_server.rewards.penalties import LengthPenaltySettings, RepeatedQuerySettings, SearchCostSettings
from rollout_server.rewards.remote import EndpointSettings
from rollout_server.rewards.research import ReSearchSettings
from rollout_server.rewards.resources import Io
from rollout_server.rewards.retrieval import RetrievalHitSettings, TurnRetrievalSettings
from rollout_server.rewards.semantic import SemanticSettings
from rollout_server.rewards.text_match import CoverMatchSettings, ExactMatchSettings, F1Settings

RewardSettings = Annotated[
    ExactMatchSettings
    | CoverMatchSettings
    | F1Settings
    | FormatSettings
    | ReSearchSettings
    | RetrievalHitSettings
    | SemanticSettings
    | JudgeSettings
    | SearchCostSettings
    | LengthPenaltySettings
    | RepeatedQuerySettings
    | TurnRetrievalSettings
    | TurnFormatSettings
    | CustomSettings,
    Field(discriminator="type"),
]
REGISTRY: dict[type[WeightedReward], str] = {
    ExactMatchSettings: "text_match:ExactMatch",
    CoverMatchSettings: "text_match:CoverMatch",
    F1Settings: "text_match:F1",
    FormatSettings: "format:Format",
    ReSearchSettings: "research:ReSearch",
    RetrievalHitSettings: "retrieval:RetrievalHit",
    SemanticSettings: "semantic:Semantic",
    JudgeSettings: "judge:Judge",
    SearchCostSettings: "penalties:SearchCost",
    LengthPenaltySettings: "penalties:LengthPenalty",
    RepeatedQuerySettings: "penalties:RepeatedQuery",
    TurnRetrievalSettings: "retrieval:TurnRetrieval",
    TurnFormatSettings: "format:TurnFormat",
    CustomSettings: "custom:Custom",
}


def build_reward(settings: WeightedReward, io: Io) -> Reward | TurnReward:
    """Instantiate the reward for `settings`. Those that ask a service share the connections of `io`.

    Raises UserError for a function that cannot be imported, or an API key that is not set.
    """
    module, name = REGISTRY[type(settings)].split(":")
    reward = getattr(import_module(f"{__name__}.{module}"), name)
    built: Reward | TurnReward = reward(settings, io) if isinstance(settings, EndpointSettings) else reward(settings)
    return built
