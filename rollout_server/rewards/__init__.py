"""Rewards: their settings and registry."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from protocol.settings import union_of
from rollout_server.rewards.base import Reward, RewardSettingsBase, TurnReward
from rollout_server.rewards.custom import CustomSettings
from rollout_server.rewards.format import FormatSettings, TurnFormatSettings
from rollout_server.rewards.http import HttpRewardSettings
from rollout_server.rewards.judge import JudgeSettings
from rollout_server.rewards.penalties import (
    LengthPenaltySettings,
    MissingActionSettings,
    RepeatedQuerySettings,
    SearchCostSettings,
)
from rollout_server.rewards.remote import RewardServiceSettings
from rollout_server.rewards.research import ReSearchSettings
from rollout_server.rewards.resources import RewardResources
from rollout_server.rewards.retrieval import RetrievalHitSettings, TurnRetrievalSettings
from rollout_server.rewards.semantic import SemanticSettings
from rollout_server.rewards.text_match import CoverMatchSettings, ExactMatchSettings, F1Settings

REGISTRY: dict[type[RewardSettingsBase], str] = {
    ExactMatchSettings: "rollout_server.rewards.text_match:ExactMatch",
    CoverMatchSettings: "rollout_server.rewards.text_match:CoverMatch",
    F1Settings: "rollout_server.rewards.text_match:F1",
    FormatSettings: "rollout_server.rewards.format:FormatReward",
    ReSearchSettings: "rollout_server.rewards.research:ReSearch",
    RetrievalHitSettings: "rollout_server.rewards.retrieval:RetrievalHit",
    SemanticSettings: "rollout_server.rewards.semantic:Semantic",
    JudgeSettings: "rollout_server.rewards.judge:Judge",
    SearchCostSettings: "rollout_server.rewards.penalties:SearchCost",
    MissingActionSettings: "rollout_server.rewards.penalties:MissingAction",
    LengthPenaltySettings: "rollout_server.rewards.penalties:LengthPenalty",
    RepeatedQuerySettings: "rollout_server.rewards.penalties:RepeatedQuery",
    TurnRetrievalSettings: "rollout_server.rewards.retrieval:TurnRetrieval",
    TurnFormatSettings: "rollout_server.rewards.format:TurnFormat",
    CustomSettings: "rollout_server.rewards.custom:Custom",
    HttpRewardSettings: "rollout_server.rewards.http:HttpReward",
}
"""Settings class -> "module:Class"; the class takes the settings."""

if TYPE_CHECKING:
    RewardSettings = RewardSettingsBase
else:
    RewardSettings = union_of(REGISTRY)


def build_reward(settings: RewardSettingsBase, resources: RewardResources) -> Reward | TurnReward:
    """Instantiate the reward for `settings`. Rewards that call a service share the connections of `resources`.

    Raises UserError if a function cannot be imported or an API key is not set.
    """
    reward = resolve_name(REGISTRY[type(settings)])
    built: Reward | TurnReward = (
        reward(settings, resources) if isinstance(settings, RewardServiceSettings) else reward(settings)
    )
    return built
