"""Exact match, cover match and F1: Search-R1's normalisation, the best gold answer, and no answer is no answer."""

from __future__ import annotations

import pytest

from protocol.messages import Question, Status
from rollout_server.reward.base import Outcome
from rollout_server.reward.cover_em import CoverMatch
from rollout_server.reward.exact_match import ExactMatch, normalise
from rollout_server.reward.f1 import F1, f1


def outcome(answer: str | None, *golds: str) -> Outcome:
    return Outcome(Question(id="q", text="?", answers=golds), Status.ANSWERED, answer, (), 0)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("a.n. other", "other"),  # punctuation goes first: "an other", then the article
        ("An Apple a Day", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("Łódź — city", "łódź — city"),  # only ASCII punctuation
        ("", ""),
    ],
)
def test_normalisation_is_that_of_search_r1(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "golds", "score"),
    [
        ("the Beatles.", ("Queen", "Beatles"), 1.0),
        ("beatles band", ("Beatles",), 0.0),
        ("", ("",), 1.0),
        ("x", (), 0.0),
        (None, ("",), 0.0),
    ],
)
async def test_exact_match_takes_the_best_gold_answer(answer: str | None, golds: tuple[str, ...], score: float) -> None:
    assert await ExactMatch()(outcome(answer, *golds)) == score


@pytest.mark.parametrize(
    ("answer", "golds", "score"),
    [
        ("it was the Beatles, I think", ("Queen", "The Beatles"), 1.0),
        ("I do not know", ("no",), 0.0),
        ("Jane A. Austen", ("Jane Austen",), 1.0),
        ("Austen Jane", ("Jane Austen",), 0.0),
        ("anything", ("the",), 0.0),
        (None, ("x",), 0.0),
    ],
)
async def test_cover_match_wants_whole_words_in_order(answer: str | None, golds: tuple[str, ...], score: float) -> None:
    assert await CoverMatch()(outcome(answer, *golds)) == score


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("jane austen", "Jane Austen", 1.0),
        ("austen", "Jane Austen", 2 / 3),
        ("jane jane austen", "Jane Austen", 4 / 5),
        ("x", "Jane Austen", 0.0),
        ("yes it is", "yes", 0.0),
        ("yes", "yes", 1.0),
        ("", "x", 0.0),
    ],
)
def test_f1_counts_words_as_a_multiset(answer: str, gold: str, score: float) -> None:
    assert f1(answer, gold) == pytest.approx(score)


async def test_f1_takes_the_best_gold_answer_and_none_is_zero() -> None:
    assert await F1()(outcome("austen", "Charlotte Bronte", "Jane Austen", "Austen")) == 1.0
    assert await F1()(outcome(None, "austen")) == 0.0
    assert await F1()(outcome("austen")) == 0.0
