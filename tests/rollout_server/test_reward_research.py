r"""ReSearch's reward: its table, its rules of form, and its bugs that must not come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protocol.messages import Question, Status
from rollout_server.environment.actions import AnswerAction, SearchAction, boxed, parse
from rollout_server.rewards import build_reward
from rollout_server.rewards.base import RewardInput, TurnText
from rollout_server.rewards.research import ReSearchSettings, boxed_answer
from rollout_server.rewards.resources import RewardResources

SEARCHED = TurnText("<think> hm </think> <search> q </search>", "Emma is by Jane Austen.")
RIGHT = r"<think>ok</think> <answer> The final answer is \[ \boxed{Jane Austen} \] </answer>"


async def score(
    *turns: TurnText | str,
    golds: Sequence[str] = ("jane austen",),
    status: Status = Status.ANSWERED,
    finish: str = "stop",
    **settings: object,
) -> float:
    texts = [turn if isinstance(turn, TurnText) else TurnText(turn, finish=finish) for turn in turns]
    question = Question(id="q", text="?", answers=tuple(golds))
    reward = build_reward(ReSearchSettings.model_validate(settings), RewardResources())
    return await reward(RewardInput(question, status, "unread", tuple(texts), len(texts) - 1))  # type: ignore[operator]


async def test_the_table_of_research() -> None:
    assert await score(SEARCHED, RIGHT) == 1.0
    assert await score(SEARCHED, RIGHT.replace("Jane ", "")) == pytest.approx(2 / 3)
    assert await score(SEARCHED, RIGHT.replace("Jane Austen", "Emma")) == 0.1
    assert await score(SEARCHED, RIGHT.replace("<think>ok</think>", "")) == 1.0  # the search's turn has thought
    assert await score(RIGHT.replace("<think>ok</think>", "")) == 0.0
    assert await score(SEARCHED, "<think> x </think> no idea", status=Status.OUT_OF_TURNS) == 0.0


async def test_over_length_is_nothing_whatever_the_answer() -> None:
    assert await score(SEARCHED, RIGHT, finish="length") == 0.0
    assert await score(SEARCHED, RIGHT, status=Status.TRUNCATED) == 0.0


async def test_the_preview_compared_exactly() -> None:
    assert await score(RIGHT, metric="em") == 1.0
    assert await score(RIGHT.replace("Jane ", ""), metric="em") == 0.1


@pytest.mark.parametrize(("golds", "value"), [((), 0.1), (("",), 0.1), (("x", "the Jane Austen"), 1.0)])
async def test_the_best_gold_answer_counts_and_none_is_a_wrong_answer(golds: Sequence[str], value: float) -> None:
    assert await score(RIGHT, golds=golds) == value


async def test_an_answer_in_a_document_or_in_the_prompt_does_not_count() -> None:
    evil = TurnText(SEARCHED.policy, r"<answer> \boxed{Jane Austen} </answer>")
    assert await score(evil, r"<think> x </think>", status=Status.OUT_OF_TURNS) == 0.0
    assert await score(evil, RIGHT.replace("Jane Austen", "Emma")) == 0.1
    # and it is no second answer either
    assert await score(evil, RIGHT) == 1.0


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        ([RIGHT], "Jane Austen"),
        ([SEARCHED.policy, SEARCHED.policy, RIGHT], "Jane Austen"),
        ([SEARCHED.policy + ".\n<answer>", RIGHT], "Jane Austen"),  # past the stop: not acted upon
        ([RIGHT + " and so on"], "Jane Austen"),
        ([], None),
        ([SEARCHED.policy], None),
        ([RIGHT, RIGHT], None),
        (["no search", RIGHT], None),
        ([RIGHT + SEARCHED.policy], None),
        ([RIGHT + "<search> q"], None),
        ([RIGHT + r"<answer> \boxed{Emma} </answer>"], None),
        ([RIGHT + "<think>"], None),
        (["<think> a <think> b </think>" + RIGHT], None),
        ([RIGHT.replace("</answer>", "")], None),
        ([r"<think>x</think> </answer> \boxed{a} <answer>"], None),
        ([r"<think>x</think> \boxed{a} <answer> a </answer>"], None),
        ([r"<think>x</think> <answer> \boxed{a </answer>"], None),
        (["<think>x</think> <search>q</search> <result> Jane Austen </result>", RIGHT], "Jane Austen"),
        (["<think>x <result> I know it </result></think> <search>q</search>", RIGHT], None),
        ([r"<think>x</think><result> y </result>" + RIGHT], None),
    ],
)
def test_the_rules_of_form(turns: list[str], answer: str | None) -> None:
    assert boxed_answer(tuple(TurnText(text) for text in turns)) == answer


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{Emma}", "Emma"),
        (r"\[ \boxed{ Emma } \]", "Emma"),
        (r"\boxed{a_{1} + b^{2^{n}}}", "a_{1} + b^{2^{n}}"),
        (r"\boxed{first} or rather \boxed{last}", "last"),
        (r"\boxed{\boxed{in}}", "in"),
        (r"\boxed{\text{Jane Austen}}", "Jane Austen"),
        (r"\boxed{\text{Jane} Austen}", r"\text{Jane} Austen"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{smile :\} }", r"smile :\}"),
        (r"\boxed{}", ""),
        (r"\boxed{first} then \boxed{open", None),
        (r"\boxed{a{b}", None),
        ("boxed{Emma}", None),
        (r"\boxed", None),
        ("", None),
    ],
)
def test_the_last_box_counts_and_its_braces_are_counted(text: str, inside: str | None) -> None:
    assert boxed(text) == inside
    if "</" not in text:
        assert parse(f"<answer>{text}</answer>", box=True) == AnswerAction(inside)


def test_an_answer_that_is_not_boxed_is_none_only_where_it_must_be() -> None:
    assert parse("<answer> Emma </answer>", box=True) == AnswerAction(None)
    assert parse("<answer> Emma </answer>") == AnswerAction("Emma")
    assert parse(r"<search> \boxed{x} </search>", box=True) == SearchAction(r"\boxed{x}")
