"""Settings of the environment: template, limits, rewards, tools. Imports nothing heavy.

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

MAX_REWARD_NAME = 249
"""Its metric `reward/NAME` may have 256 characters."""


class EnvironmentSettings(Settings):
    """One trajectory: a question, at most `max_turns` actions, an answer. Also applies to episodes (evaluation)."""

    template: str = "search_r1"
    """Prompt template: texts and tags of the protocol."""
    max_turns: int = Field(default=4, ge=0, le=MAX_SEGMENTS // 2 - 2)
    """Maximum number of searches and tool calls together. After the last one the policy writes one more turn, in which
    searches and calls are ignored."""
    max_new_tokens: int = Field(default=500, ge=1)
    """Maximum tokens that the policy generates per turn."""
    max_obs_tokens: int = Field(default=500, ge=16)
    """Maximum tokens per observation, including its tags. Passages are cut, the closing tag is kept."""
    max_context: int = Field(default=4096, ge=32)
    """Maximum tokens of a trajectory: prompt, turns and observations together. Must fit the engine's context length. If
    a recipe has separate limits for prompt and response, use their sum."""
    reserve_tokens: int = Field(default=16, ge=1)
    """Tokens that an observation must leave for the policy. With fewer left, the trajectory ends as truncated."""
    on_search_error: Literal["observe", "mask", "drop"] = "observe"
    """What to do when a search or tool fails after its retries. observe: the policy sees the failure and continues, and
    the trajectory is valid. mask: the trajectory ends as failed and is invalid. drop: as mask, and the whole group is
    generated again."""
    min_valid: int = Field(default=2, ge=1)
    """Minimum number of valid trajectories per group, i.e. not failed and not stale (at most the group size)."""
    rewards: tuple[RewardSettings, ...] = Field(default=(ExactMatchSettings(),), min_length=1, max_length=64)
    """Rewards of a trajectory, added up by weight. A weight of 0 only records the score."""
    tools: tuple[ToolSettings, ...] = Field(default=(), max_length=16)
    """Tools that the policy may call besides the search. Each adds a sentence to the prompt. Without tools the prompts
    are exactly the published ones."""

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
            raise ValueError(f"two rewards have the same name: {', '.join(names)}")
        if too_long := [name for name in names if len(name) > MAX_REWARD_NAME]:
            raise ValueError(f"a reward's name has more than {MAX_REWARD_NAME} characters: {too_long[0][:40]}...")
        tags = [tool.type for tool in self.tools]
        if len(set(tags)) < len(tags):
            raise ValueError(f"a tool is listed twice: {', '.join(tags)}")
        if self.reserve_tokens >= self.max_context:
            raise ValueError("reserve_tokens must be smaller than max_context")
        return self
