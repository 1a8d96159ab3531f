"""docs/rewards.md shows settings that work, and forgets no reward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from protocol.runtime.config import section
from rollout_server.config import RolloutSettings
from rollout_server.rewards import RewardSettings

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
FRAGMENTS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
MEMBERS: list[Any] = list(get_args(get_args(RewardSettings)[0]))


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_every_fragment_is_accepted(fragment: str) -> None:
    assert section(yaml.safe_load(fragment), "rollout", RolloutSettings).episode.rewards


def test_every_reward_has_a_row_with_its_settings_and_a_fragment() -> None:
    shown = {
        reward.type
        for fragment in FRAGMENTS
        for reward in section(yaml.safe_load(fragment), "rollout", RolloutSettings).episode.rewards
    }
    for member in MEMBERS:
        name = member.model_fields["type"].default
        row = re.search(rf"^\| `{name}`.*$", PAGE, re.MULTILINE)
        assert row and name in shown, name
        service = {"url", "model", "api_key_variable", "deadline_s", "attempts", "concurrency", "cache", "extra"}
        own = (
            set(member.model_fields)
            - {"type", "weight", "sources"}
            - (service if "url" in member.model_fields else set())
        )
        assert {field for field in own if f"`{field}`" not in row[0]} == set(), name
