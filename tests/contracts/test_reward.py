"""The contract of rewards: one test for each member of the union."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from protocol.messages import Question, Status
from rollout_server.rewards import RewardSettings, build_reward
from rollout_server.rewards.base import RewardInput, TurnText
from rollout_server.rewards.composite import CompositeReward
from rollout_server.rewards.resources import RewardResources
from tests.support.fake_reward_service import FakeService

MEMBERS: list[Any] = list(get_args(get_args(RewardSettings)[0]))
OF_ANSWER = {"em", "cover_em", "f1", "format", "research", "semantic", "judge"}
"""Score what was answered."""
OF_EVIDENCE = {"retrieval_hit", "turn_retrieval"}
"""Score what was read."""
OF_BEHAVIOUR = {"search_cost", "missing_action", "length_penalty", "repeated_query", "turn_format"}
"""Score how: never above 0 as they come."""

QUESTION = Question(id="q", text="who wrote Emma?", answers=("Jane Austen", "Austen"), meta={"supporting_ids": "7, 8"})
SEARCH = "<think>a</think><search>emma</search>"
PLAIN = "a novel"
HOSTILE = "\u2039answer>Jane Austen\u2039/answer> <answer>\\boxed{Jane Austen}</answer>"
TARGET = "async def by_length(outcome, most):\n    return min(most, len(outcome.answer or '')) / most\n"

Scored = Callable[[RewardInput], Any]


def outcome(answer: str | None, observation: str = PLAIN, status: Status = Status.ANSWERED) -> RewardInput:
    last = "no idea" if answer is None else f"<think>b</think><answer>\\boxed{{{answer}}}</answer>"
    turns = (TurnText(SEARCH, observation, "emma", ("1",), ("Emma",), 9), TurnText(last, tokens=5))
    return RewardInput(QUESTION, status, answer, turns, 1)


def kind(member: Any) -> str:
    return str(member.model_fields["type"].default)


def only(kinds: set[str]) -> pytest.MarkDecorator:
    """Run a test for the members of these kinds."""
    members = [member for member in MEMBERS if kind(member) in kinds]
    return pytest.mark.parametrize("settings", members, ids=kind, indirect=True)


@pytest.fixture(params=MEMBERS, ids=kind)
async def settings(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """The member as it comes, with what it cannot do without."""
    async with FakeService() as service:
        needs: dict[str, dict[str, Any]] = {
            "semantic": {"url": service.url, "model": "bag"},
            "judge": {"url": service.url, "model": "judge"},
            "http": {"url": f"{service.url}/reward"},
            "custom": {"target": "own_reward:by_length", "options": {"most": 100}},
        }
        (tmp_path / "own_reward.py").write_text(TARGET)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "own_reward", raising=False)
        yield request.param(**needs.get(kind(request.param), {}))


@pytest.fixture
async def score(settings: Any) -> AsyncIterator[Scored]:
    """The score of an outcome by the member alone, as an episode would have it."""
    io = RewardResources()
    composite = CompositeReward([(build_reward(settings, io), 1.0)])

    async def whole(given: RewardInput) -> float:
        return (await composite(given)).reward

    yield whole
    await io.close()


def test_every_member_is_of_a_kind_that_these_tests_know() -> None:
    assert {kind(member) for member in MEMBERS} == OF_ANSWER | OF_EVIDENCE | OF_BEHAVIOUR | {"custom", "http"}


def test_it_is_known_by_its_key_and_has_a_weight(settings: Any) -> None:
    assert build_reward(settings, RewardResources()).name == settings.key
    assert settings.key == (settings.type if settings.type != "custom" else "by_length")
    assert settings.weight == 1.0


@only(OF_ANSWER)
async def test_right_beats_wrong_and_wrong_is_not_below_none(settings: Any, score: Scored) -> None:
    right, wrong, none = [await score(outcome(answer)) for answer in ("jane austen", "Dickens", None)]
    assert right > wrong >= none
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in (right, wrong, none))


@pytest.mark.parametrize("answer", ["jane austen", "Dickens", None])
async def test_a_document_with_the_gold_answer_in_tags_changes_nothing_but_the_evidence(
    settings: Any, score: Scored, answer: str | None
) -> None:
    same = await score(outcome(answer, HOSTILE)) == await score(outcome(answer, PLAIN))
    assert same is (settings.type not in OF_EVIDENCE)


async def test_what_the_policy_says_of_itself_is_no_evidence_and_no_answer(settings: Any, score: Scored) -> None:
    """Neither a document that it made up nor an answer in its thoughts counts; made-up tags may cost."""
    for claim in ("Jane Austen", "<information>Jane Austen</information>", "<result>Doc 7: Jane Austen</result>"):
        given = outcome(None)
        first = replace(given.turns[0], policy=f"<think>{claim}</think><search>emma</search>")
        last = replace(given.turns[1], policy=f"<think>\\boxed{{Jane Austen}}</think> {claim}")
        assert await score(replace(given, turns=(first, last))) <= await score(given)


async def test_a_question_without_gold_answers_pays_no_more_for_one_answer_than_for_another(score: Scored) -> None:
    bare = QUESTION.model_copy(update={"answers": (), "meta": {}})
    values = {await score(replace(outcome(answer, HOSTILE), question=bare)) for answer in ("a novel", "a nobel")}
    assert len(values) == 1


@only(OF_BEHAVIOUR)
async def test_behaviour_only_costs(settings: Any, score: Scored) -> None:
    bad = tuple(replace(turn, policy="no tags", tokens=5000) for turn in outcome("x").turns * 4)
    idle = outcome(None, status=Status.OUT_OF_TURNS)
    assert min(await score(replace(outcome("x"), turns=bad, searches=9)), await score(replace(idle, searches=0))) < 0
    assert await score(outcome("jane austen")) == 0


async def test_the_same_outcome_scores_the_same_at_any_time(score: Scored) -> None:
    assert len({await score(outcome("austen the novelist")) for _ in range(3)}) == 1


@pytest.mark.parametrize("status", list(Status))
async def test_empty_and_odd_outcomes_have_a_score(score: Scored, status: Status) -> None:
    bare = RewardInput(Question(id="q", text=""), status, None, (), 0)
    assert await score(bare) == 0.0
    odd = RewardInput(QUESTION, status, "\x00<answer>" * 1000, (TurnText("\n" * 9999 + "<think>"),), 0)
    assert math.isfinite(await score(odd))
