"""Settings of the environment: template, budgets, rewards, tools. Imports nothing heavy.

Rewards and tools are unions over `type`; their registries are in `rewards/__init__.py` and `tools/__init__.py`.
"""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import Field, field_validator, model_validator

from protocol.messages import MAX_SEGMENTS
from protocol.settings import Settings
from rollout_server.environment.prompts import TEMPLATES
from rollout_server.rewards import RewardSettings
from rollout_server.rewards.text_match import ExactMatchSettings
from rollout_server.tools import ToolSettings


class EnvironmentSettings(Settings):
    """One episode: a question, up to `max_turns` actions, an answer."""

    template: str = "search_r1"
    """Prompt template: the texts and tags of the protocol."""
    max_turns: int = Field(default=4, ge=0, le=MAX_SEGMENTS // 2 - 2)
    """Most searches and calls of tools, together. After the last one the policy writes once more, and a search or a
    call in that turn is ignored."""
    max_new_tokens: int = Field(default=500, ge=1)
    """Most tokens that the policy writes in one turn."""
    max_obs_tokens: int = Field(default=500, ge=16)
    """Most tokens of one observation, tags included. Passages are cut, the closing tag is not."""
    max_context: int = Field(default=4096, ge=32)
    """Most tokens of a trajectory: prompt, turns and observations together. Must fit the engine's context length. Where
    a recipe gives budgets for prompt and response, it is their sum."""
    reserve_tokens: int = Field(default=16, ge=1)
    """Room that an observation must leave for the policy; with less left the trajectory ends truncated."""
    on_search_error: Literal["observe", "mask", "drop"] = "observe"
    """A search or a tool that failed after its retries. observe: the policy sees it and goes on, the trajectory counts.
    mask: the trajectory ends as failed and does not count. drop: the same, and its whole group is rolled out again."""
    min_valid: int = Field(default=2, ge=1)
    """Fewest trajectories of a group that must have ended by the policy's own doing (never more than its size)."""
    rewards: tuple[RewardSettings, ...] = Field(default=(ExactMatchSettings(),), min_length=1, max_length=64)
    """Scores of a trajectory; its reward is their sum by weight. A weight of 0 is measured only."""
    tools: tuple[ToolSettings, ...] = Field(default=(), max_length=16)
    """What the policy may call besides the search. Each adds a sentence to the prompt; without any the prompts are the
    published ones, to the byte."""

    @field_validator("template")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in TEMPLATES:
            near = difflib.get_close_matches(name, TEMPLATES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(sorted(TEMPLATES))
            raise ValueError(f"unknown template, {hint}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentSettings:
        names = [reward.key for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"a reward is listed twice, or two have one name: {', '.join(names)}")
        tags = [tool.type for tool in self.tools]
        if len(set(tags)) < len(tags):
            raise ValueError(f"a tool is listed twice: {', '.join(tags)}")
        if self.reserve_tokens >= self.max_context:
            raise ValueError("reserve_tokens leaves no room in max_context")
        return self
