"""Penalties on searches, length, repetition and format: never above 0, capped, and for the policy's tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from protocol.messages import Question, Status
from rollout_server.rewards import build_reward
from rollout_server.rewards.base import RewardInput, TurnText
from rollout_server.rewards.format import TurnFormatSettings, well_formed
from rollout_server.rewards.penalties import (
    LengthPenaltySettings,
    MissingActionSettings,
    RepeatedQuerySettings,
    SearchCostSettings,
)
from rollout_server.rewards.resources import RewardResources

QUESTION = Question(id="q", text="?")
LONG = "words " * 5000


def outcome(turns: Sequence[TurnText] = (), searches: int = 0) -> RewardInput:
    return RewardInput(QUESTION, Status.ANSWERED, None, tuple(turns), searches)


@pytest.mark.parametrize(
    ("searches", "settings", "cost"),
    [
        (0, {}, 0.0),
        (1, {}, 0.0),
        (3, {}, -0.2),
        (99, {}, -1.0),
        (3, {"free": 0, "each": 0.5, "cap": 9}, -1.5),
        (3, {"free": 5}, 0.0),
    ],
)
async def test_searches_beyond_the_free_ones_cost_up_to_a_cap(
    searches: int, settings: dict[str, Any], cost: float
) -> None:
    reward = build_reward(SearchCostSettings(**settings), RewardResources())
    assert await reward(outcome(searches=searches)) == pytest.approx(cost)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("searches", "answer", "settings", "penalty"),
    [
        (1, "x", {}, 0.0),
        (0, "x", {}, -0.1),
        (2, None, {}, -0.1),
        (0, None, {}, -0.2),
        (0, "", {"search": 0.5, "answer": 0.25}, -0.5),
        (0, None, {"search": 0.0}, -0.1),
    ],
)
async def test_no_search_and_no_answer_cost(
    searches: int, answer: str | None, settings: dict[str, Any], penalty: float
) -> None:
    reward = build_reward(MissingActionSettings(**settings), RewardResources())
    given = replace(outcome([TurnText("x")], searches=searches), answer=answer)
    assert await reward(given) == pytest.approx(penalty)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("shape", "tokens", "penalty"),
    [
        ("overlong", 0, 0.0),
        ("overlong", 80, 0.0),
        ("overlong", 85, -0.25),
        ("overlong", 100, -1.0),
        ("overlong", 150, -1.0),  # AReaL and verl's recipe go on to -2.5 here
        ("proportional", 0, 0.0),
        ("proportional", 25, -0.25),
        ("proportional", 1000, -1.0),
    ],
)
async def test_length_is_what_the_policy_sampled_and_costs_one_at_most(shape: str, tokens: int, penalty: float) -> None:
    reward = build_reward(
        LengthPenaltySettings.model_validate({"shape": shape, "max_tokens": 100, "buffer": 20}), RewardResources()
    )
    turns = [TurnText("x", LONG, tokens=tokens // 2), TurnText("y", LONG, tokens=tokens - tokens // 2)]
    assert await reward(outcome(turns)) == pytest.approx(penalty)  # type: ignore[operator]


async def test_the_turn_that_repeats_a_query_pays_for_it() -> None:
    queries = ["Jane Austen", "emma", "the JANE austen!", "", "", "?", "!", "?", "emma"]
    turns = [TurnText("x", query=query) for query in queries]
    reward = build_reward(RepeatedQuerySettings(), RewardResources())
    assert list(await reward.per_turn(outcome(turns))) == [0, 0, -1, 0, 0, 0, 0, -1, -1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "formed"),
    [
        ("<search>b</search>", True),
        (" <think>a</think> <answer>b</answer>", True),
        ("a thought <search>b</search>", False),
        ("<think>a<search>b</search>", False),
        ("<think>a</think><think>a</think><search>b</search>", False),
        ("<answer>b", False),
    ],
)
async def test_a_thought_may_be_optional(text: str, formed: bool) -> None:
    reward = build_reward(TurnFormatSettings(think="optional"), RewardResources())
    (score,) = await reward.per_turn(outcome([TurnText(text, "")]))  # type: ignore[union-attr]
    assert score == (0.0 if formed else -1.0)
    assert well_formed((TurnText("<search>a</search>", "", query="a"), TurnText(text, "")), "optional") == (
        formed and "answer" in text
    )


@pytest.mark.parametrize(
    ("text", "formed"),
    [
        ("<think>a</think><search>b</search>", True),
        ("\n<think>a</think>\n<answer>b</answer> and more", True),
        ("<think>a</think>", False),
        ("<search>b</search>", False),
        ("<think>a</think> so <search>b</search>", False),
        ("<think>a</think><information>b</information><search>b</search>", False),
        ("<think>a <result>b</result></think><answer>b</answer>", False),
        ("<think><think>a</think></think><answer>b</answer>", False),
        ("", False),
    ],
)
async def test_an_ill_formed_turn_costs_and_a_well_formed_one_earns_nothing(text: str, formed: bool) -> None:
    per_turn = build_reward(TurnFormatSettings(), RewardResources()).per_turn  # type: ignore[union-attr]
    assert list(await per_turn(outcome([TurnText(text)] * 2))) == [0.0 if formed else -1.0] * 2
    per_turn = build_reward(TurnFormatSettings(well=0.5, ill=0.0), RewardResources()).per_turn  # type: ignore[union-attr]
    assert list(await per_turn(outcome([TurnText(text)]))) == [0.5 if formed else 0.0]
