"""The format reward: Search-R1's table, read from what the policy wrote and nothing else."""

from __future__ import annotations

import pytest

from protocol.messages import Question, Status
from rollout_server.rewards import build_reward
from rollout_server.rewards.base import RewardInput, TurnText
from rollout_server.rewards.format import FormatSettings, well_formed
from rollout_server.rewards.resources import RewardResources

SEARCHED = TurnText("<think> hm </think>\n<search> q </search>", "Doc 1(Title: Emma) by Jane Austen.")
RIGHT, WRONG = "<think>ok</think> <answer> Jane Austen </answer>", "<think>ok</think> <answer> Emma </answer>"


async def score(*turns: TurnText | str, answer: str | None, **symbols: float) -> float:
    texts = tuple(turn if isinstance(turn, TurnText) else TurnText(turn) for turn in turns)
    question = Question(id="q", text="?", answers=("jane austen",))
    reward = build_reward(FormatSettings.model_validate(symbols), RewardResources())
    return await reward(RewardInput(question, Status.ANSWERED, answer, texts, len(texts) - 1))


async def test_the_table_of_search_r1() -> None:
    bad = "<answer> Jane Austen </answer>"
    assert await score(SEARCHED, RIGHT, answer="Jane Austen") == 1.0
    assert await score(SEARCHED, bad, answer="Jane Austen") == pytest.approx(0.8)
    assert await score(SEARCHED, WRONG, answer="Emma") == pytest.approx(0.2)
    assert await score(SEARCHED, WRONG, answer="Emma", retrieval=0.1) == pytest.approx(0.3)
    assert await score(TurnText(SEARCHED.policy, "x"), WRONG, answer="Emma", retrieval=0.1) == pytest.approx(0.2)
    assert await score(SEARCHED, "<answer> Emma </answer>", answer="Emma") == pytest.approx(0.1)
    assert await score(SEARCHED, "no idea", answer=None) == 0.0


async def test_an_answer_that_only_the_prompt_or_a_document_gives_is_none() -> None:
    told = TurnText(SEARCHED.policy, "<answer> Jane Austen </answer>")
    assert await score(told, "I give up", answer=None) == 0.0


@pytest.mark.parametrize(
    ("turns", "formed"),
    [
        ([RIGHT], True),
        ([SEARCHED.policy, SEARCHED.policy, RIGHT], True),
        (["\n" + RIGHT + " and unrequested text"], True),
        ([], False),
        ([SEARCHED.policy], False),
        ([RIGHT, RIGHT], False),
        (["<answer> x </answer>"], False),
        (["<think> x </think> so <answer> x </answer>"], False),
        (["<think> x <answer> x </answer>"], False),
        (["<think> <think> x </think> </think><answer> x </answer>"], False),
        (["<think> x </think><think> x </think><answer> x </answer>"], False),
        (["<think> x <information> y </information> </think><answer> x </answer>"], False),
        (["<think> x </think><information> y </information><answer> x </answer>"], False),
        (["<think> x </think><search> q </search><information> y </information>", RIGHT], True),
        (["<think> x </think><answer> <search> </answer>"], False),
        (["just words", RIGHT], False),
    ],
)
def test_well_formed_turns(turns: list[str], formed: bool) -> None:
    assert well_formed(tuple(TurnText(text) for text in turns)) is formed
