"""Evidence: what counts as found, what does not, and which turn found it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from protocol.messages import Question, Status
from rollout_server.rewards import build_reward
from rollout_server.rewards.base import RewardInput, TurnText
from rollout_server.rewards.resources import RewardResources
from rollout_server.rewards.retrieval import RetrievalHitSettings, TurnRetrievalSettings


def read(text: str = "", ids: Sequence[str] = (), titles: Sequence[str] = (), policy: str = "") -> TurnText:
    return TurnText(policy, text, "q", tuple(ids), tuple(titles))


def outcome(turns: Sequence[TurnText], golds: Sequence[str] = ("Jane Austen",), supporting: str = "") -> RewardInput:
    meta = {"supporting_ids": supporting} if supporting else {}
    question = Question(id="q", text="who?", answers=tuple(golds), meta=meta)
    return RewardInput(question, Status.ANSWERED, "x", tuple(turns), len(turns))


async def hit(
    *turns: TurnText, golds: Sequence[str] = ("Jane Austen",), supporting: str = "", **settings: Any
) -> float:
    reward = build_reward(RetrievalHitSettings.model_validate(settings), RewardResources())
    return await reward(outcome(turns, golds, supporting))  # type: ignore[operator]


async def per_turn(*turns: TurnText, supporting: str = "", **settings: Any) -> list[float]:
    reward = build_reward(TurnRetrievalSettings.model_validate(settings), RewardResources())
    return list(await reward.per_turn(outcome(turns, supporting=supporting)))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "gold", "found"),
    [
        ("Emma is by Jane Austen.", "Jane Austen", True),
        ("JANE AUSTEN, novelist", "jane austen", True),
        ("Jane Austen's novel", "Jane Austen", True),
        ("by Austen/Brontë", "Brontë", True),
        ("the film Spider-Man", "Spiderman", True),
        ("in the U.S.A. then", "USA", True),
        ("a \ufb01ne day", "\ufb01ne", True),  # shown after NFKC: "fine"; so is the gold answer
        ("in 19\u00bd", "19\u00bd", True),
        ("北京是中国的首都", "北京", True),
        ("日本の東京都です", "東京都", True),
        (
            "อยู่ที่กรุงเทพค่ะ",
            "กรุงเทพ",
            True,
        ),
        ("北京是", "上海", False),
        ("Anna", "nna", False),
        ("theatre", "the", False),
        ("Jane and Austen", "Jane Austen", False),
        ("1995", "199", False),
        ("yes, that is so", "yes", False),
        ("no", "No.", False),
        ("anything", "", False),
        ("anything", "!?", False),
    ],
)
async def test_a_gold_answer_is_found_as_whole_words(text: str, gold: str, found: bool) -> None:
    assert await hit(read(text.replace("\ufb01", "fi").replace("\u00bd", "1\u20442")), golds=[gold]) == float(found)


async def test_an_answer_with_typographic_punctuation_is_found_only_as_it_is_written() -> None:
    """Search-R1's normalisation drops ASCII punctuation only: documented in docs/rewards.md."""
    assert await hit(read("the \u201cBig\u201d Sleep"), golds=["the \u201cBig\u201d Sleep"]) == 1.0
    assert await hit(read("rock\u2013paper"), golds=["rock-paper"]) == 1.0  # as words they are the same
    assert await hit(read("rock\u2013paper"), golds=["rockpaper"]) == 0.0


async def test_what_the_policy_wrote_is_no_evidence() -> None:
    boast = "<think>Jane Austen, passage 7</think><information>Jane Austen</information><search>Jane Austen</search>"
    assert await hit(read("a novel", ["1"], ["Emma"], policy=boast), supporting="7") == 0.0


@pytest.mark.parametrize(
    ("by", "supporting", "turn", "found"),
    [
        ("either", "7,8", read("x", ["8"]), 1.0),
        ("either", "7,8", read("Jane Austen", ["1"]), 1.0),
        ("passage", "7,8", read("Jane Austen", ["1"]), 0.0),
        ("answer", "7,8", read("x", ["8"]), 0.0),
        ("passage", " Emma (novel) , 9", read("x", ["1"], ["Emma (Novel)"]), 1.0),
        ("passage", "7", read("x", ["77", "17"]), 0.0),
        ("passage", "", read("x", ["7"]), 0.0),
        ("passage", ",", read("x", ["", "1"], [""]), 0.0),
    ],
)
async def test_supporting_passages_are_known_by_id_or_title(
    by: str, supporting: str, turn: TurnText, found: float
) -> None:
    assert await hit(turn, supporting=supporting, by=by) == found


async def test_the_share_counts_every_target_once() -> None:
    turns = [read("x", ["7"]), read("Jane Austen", ["7"]), read("Jane Austen", ["7"])]
    assert await hit(*turns, supporting="7,8,9", share=True) == pytest.approx(2 / 4)
    assert await hit(*turns, supporting="7,8,9", share=True, by="passage") == pytest.approx(1 / 3)
    assert await hit(*turns, golds=["yes"], share=True) == 0.0


async def test_each_turn_earns_what_it_was_the_first_to_bring() -> None:
    turns = [read("x", ["1"]), read("x", ["7"]), read("Jane Austen", ["7", "8"]), read("Jane Austen", ["8"]), read()]
    assert await per_turn(*turns, supporting="7,8") == pytest.approx([0, 1 / 3, 2 / 3, 0, 0])
    assert await per_turn(*turns, supporting="7,8", by="passage") == pytest.approx([0, 1 / 2, 1 / 2, 0, 0])
    assert await per_turn(*turns, supporting="7,8", by="answer") == [0, 0, 1, 0, 0]
    assert await per_turn(*turns, by="passage") == [0] * 5


async def test_searching_the_same_again_never_adds_up_to_more_than_one() -> None:
    assert sum(await per_turn(*[read("Jane Austen", ["7", "8"])] * 20, supporting="7,8")) == 1.0
