"""Several rewards as one, and what settings refuse."""

from __future__ import annotations

import pytest

from protocol.errors import UserError
from protocol.messages import Question, Status
from protocol.settings import section
from rollout_server.config_episode import EpisodeSettings
from rollout_server.reward.base import Outcome, RewardError
from rollout_server.reward.composite import Composite


class Fixed:
    def __init__(self, name: str, value: float) -> None:
        self.name, self.value = name, value

    async def __call__(self, outcome: Outcome) -> float:
        return self.value


NOTHING = Outcome(Question(id="q", text="?"), Status.ANSWERED, None, (), 0)


async def test_the_reward_is_the_sum_by_weight_and_every_part_is_kept() -> None:
    total, parts = await Composite([(Fixed("x", 1.0), 0.5), (Fixed("y", 0.2), -1.0), (Fixed("z", 9.0), 0.0)])(NOTHING)
    assert total == pytest.approx(0.3)
    assert parts == {"x": 1.0, "y": 0.2, "z": 9.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_score_that_is_not_finite_is_an_error_and_names_the_reward(value: float) -> None:
    with pytest.raises(RewardError, match="reward x is"):
        await Composite([(Fixed("x", value), 0.0)])(NOTHING)


async def test_a_sum_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(RewardError, match="weighted sum"):
        await Composite([(Fixed("x", 1e308), 1e308)])(NOTHING)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rewards": [{"type": "em"}, {"type": "em"}]}, "listed twice"),
        ({"rewards": []}, "at least 1 item"),
        ({"rewards": [{"type": "emm"}]}, "'emm'"),
        ({"rewards": [{"type": "format", "weigth": 1}]}, "weight"),
        ({"max_context": 64, "reserve_tokens": 64}, "leaves no room"),
    ],
)
def test_settings_that_cannot_work_are_refused(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        section({"rollout": tree}, "rollout", EpisodeSettings)
