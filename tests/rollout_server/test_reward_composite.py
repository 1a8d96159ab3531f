"""Composite rewards, and invalid settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from protocol.errors import UserError
from protocol.messages import Question, Status
from protocol.runtime.config import section
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.rewards.base import RewardError, RewardInput, TurnText
from rollout_server.rewards.composite import CompositeReward, RewardPart, TrajectoryReward


class Fixed:
    def __init__(self, name: str, value: float | Exception, delay_s: float = 0.0) -> None:
        self.name, self.value, self.delay_s = name, value, delay_s
        self.ended = "not begun"

    async def __call__(self, outcome: RewardInput) -> float:
        self.ended = "cut off"
        await asyncio.sleep(self.delay_s)
        self.ended = "done"
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class PerTurn:
    def __init__(self, name: str, *values: float) -> None:
        self.name, self.values = name, values

    async def per_turn(self, outcome: RewardInput) -> Sequence[float]:
        return self.values


TWO = RewardInput(Question(id="q", text="?"), Status.ANSWERED, None, (TurnText("a"), TurnText("b")), 0)


async def test_the_reward_is_the_sum_by_weight_and_every_part_is_kept() -> None:
    score = await CompositeReward([(Fixed("x", 1.0), 0.5), (Fixed("y", 0.2), -1.0), (Fixed("z", 9.0), 0.0)])(TWO)
    assert score.reward == pytest.approx(0.3)
    assert score.parts == {"x": 1.0, "y": 0.2, "z": 9.0}
    assert score.turns == (0.0, 0.0)


async def test_what_turns_earn_is_weighted_by_turn_and_part_of_the_whole() -> None:
    parts = [(Fixed("x", 1.0), 1.0), (PerTurn("t", 1.0, -3.0), 0.5), (PerTurn("u", 0.0, 2.0), 0.25)]
    assert await CompositeReward(parts)(TWO) == TrajectoryReward(0.5, {"x": 1.0, "t": -2.0, "u": 2.0}, (0.5, -1.0))


async def test_a_reward_per_turn_that_misses_a_turn_is_an_error() -> None:
    with pytest.raises(RewardError, match="t returned 1 numbers for 2 turns"):
        await CompositeReward([(PerTurn("t", 1.0), 1.0)])(TWO)


async def test_rewards_are_computed_concurrently() -> None:
    started = time.monotonic()
    await CompositeReward([(Fixed(str(i), 1.0, delay_s=0.3), 1.0) for i in range(10)])(TWO)
    assert time.monotonic() - started < 2.0  # one after the other would take 3 s


async def test_the_first_error_ends_the_others_and_comes_out_as_itself() -> None:
    slow = Fixed("slow", 1.0, delay_s=60)
    with pytest.raises(KeyError):
        await CompositeReward([(slow, 1.0), (Fixed("bad", KeyError("x")), 1.0)])(TWO)
    assert slow.ended == "cut off"
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelling_cancels_every_part() -> None:
    slow = Fixed("slow", 1.0, delay_s=60)
    task = asyncio.create_task(CompositeReward([(slow, 1.0)])(TWO))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.ended == "cut off"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("turns", [False, True])
async def test_a_score_that_is_not_finite_is_an_error_and_names_the_reward(value: float, turns: bool) -> None:
    with pytest.raises(RewardError, match="reward x is"):
        await CompositeReward([(PerTurn("x", 1.0, value) if turns else Fixed("x", value), 0.0)])(TWO)


async def test_a_sum_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(RewardError, match="weighted sum"):
        await CompositeReward([(Fixed("x", 1e308), 1e308)])(TWO)


CUSTOM = {"type": "custom", "target": "m:f"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rewards": [{"type": "em"}, {"type": "em"}]}, "two rewards have the same name: em"),
        ({"rewards": [CUSTOM, CUSTOM]}, "two rewards have the same name: f, f"),
        ({"rewards": [{"type": "em"}, CUSTOM | {"name": "em"}]}, "two rewards have the same name"),
        ({"rewards": [CUSTOM | {"name": "n" * 250}]}, "at most 249 characters"),
        ({"rewards": [CUSTOM | {"target": "m:" + "n" * 250}]}, "a reward's name has more than 249 characters"),
        ({"rewards": []}, "at least 1 item"),
        ({"rewards": [{"type": "emm"}]}, "'emm'"),
        ({"rewards": [{"type": "format", "weigth": 1}]}, "weight"),
        ({"rewards": [{"type": "judge", "url": "http://x/v1"}]}, "model"),
        ({"rewards": [{"type": "semantic", "url": "x/v1", "model": "m"}]}, "url"),
        ({"rewards": [{"type": "judge", "url": "http://x", "model": "m", "api_key_variable": "sk-1"}]}, "api_key_var"),
        ({"rewards": [CUSTOM | {"target": "no function"}]}, "target"),
        ({"rewards": [{"type": "length_penalty", "max_tokens": 9, "buffer": 10}]}, "buffer must be at most"),
        ({"max_context": 64, "reserve_tokens": 64}, "must be smaller than max_context"),
    ],
)
def test_settings_that_cannot_work_are_refused(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        section({"rollout": tree}, "rollout", EnvironmentSettings)


def test_custom_rewards_may_be_many_by_different_names() -> None:
    two = [CUSTOM | {"name": "a"}, CUSTOM | {"name": "b"}]
    assert [r.key for r in section({"rollout": {"rewards": two}}, "rollout", EnvironmentSettings).rewards] == ["a", "b"]


async def test_a_reward_scores_the_questions_of_its_sources_only() -> None:
    def of(source: str) -> RewardInput:
        return RewardInput(Question(id="q", text="?", meta={"source": source}), Status.ANSWERED, None, (), 0)

    score = CompositeReward(
        [RewardPart(Fixed("em", 1.0), 1.0, ("nq", "mine")), RewardPart(Fixed("f1", 0.5), 1.0, ("hotpotqa",))]
    )
    assert (await score(of("nq"))).parts == {"em": 1.0}
    assert await score(of("hotpotqa")) == TrajectoryReward(0.5, {"f1": 0.5}, ())
    with pytest.raises(RewardError, match=r"no reward of .* has 'other' among its `sources`"):
        await score(of("other"))
