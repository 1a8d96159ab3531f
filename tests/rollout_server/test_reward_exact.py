"""Exact match, cover match and F1: Search-R1's normalisation, the best gold answer, and no answer is no answer."""

from __future__ import annotations

import pytest

from protocol.messages import Question, Status
from rollout_server.rewards.base import RewardInput
from rollout_server.rewards.text_match import F1, CoverMatch, ExactMatch, f1, normalise


def outcome(answer: str | None, *golds: str) -> RewardInput:
    return RewardInput(Question(id="q", text="?", answers=golds), Status.ANSWERED, answer, (), 0)


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
        ("", ("",), 0.0),
        ("x", (), 0.0),
        ("A", ("A",), 1.0),  # normalisation leaves nothing of it
        ("a.", ("A",), 1.0),
        ("", ("A",), 0.0),
        ("the", ("A",), 0.0),
        ("the a", ("A",), 0.0),
        ("...", ("A",), 0.0),
        ("The The", ("the the",), 1.0),
        ("!?", ("!?",), 1.0),
        ("...", ("!?",), 0.0),
        (" ", ("!?",), 0.0),
        ("\\boxed{Paris}", ("Paris",), 0.0),  # as in Search-R1
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
        ("vitamin A", ("A",), 0.0),
        ("A", ("A",), 1.0),
        ("", ("A",), 0.0),
        ("", ("",), 0.0),
        (None, ("x",), 0.0),
        # scripts without spaces: a substring, as in Search-R1
        ("北京。", ("北京",), 1.0),
        ("答案是北京", ("北京",), 1.0),
        ("中国首都北京市", ("北京",), 1.0),
        ("東京都です", ("東京都",), 1.0),
        ("パリです", ("パリ",), 1.0),
        ("เมืองหลวงคือกรุงเทพ", ("กรุงเทพ",), 1.0),
        ("ກຸງວຽງຈັນ", ("ວຽງຈັນ",), 1.0),  # Lao
        ("រាជធានីភ្នំពេញ", ("ភ្នំពេញ",), 1.0),  # Khmer
        ("မြို့တော်ရန်ကုန်", ("ရန်ကုန်",), 1.0),  # Burmese
        ("出生于1995年", ("1995",), 1.0),
        ("住在Paris市", ("Paris",), 1.0),
        ("在北京", ("上海",), 0.0),
        ("住在Parish", ("Paris",), 0.0),
        ("กิน", ("ก",), 0.0),  # a letter is not found without its vowel sign
        # scripts with spaces: whole words
        ("Anna", ("nna",), 0.0),
        ("Anna", ("Ann",), 0.0),
        ("Hannah and Anna", ("Anna",), 1.0),
        ("1995", ("199",), 0.0),
        ("cafe\u0301", ("cafe",), 0.0),
        ("москварека", ("Москва",), 0.0),  # Cyrillic
        ("서울은", ("서울",), 0.0),  # Hangul is written with spaces
        ("नई दिल्ली", ("दिल्ली",), 1.0),
        ("नदी", ("नद",), 0.0),  # Devanagari
        ("the \u201cEmma\u201d novel", ("Emma",), 1.0),
        # LaTeX around it
        ("\\boxed{Paris}", ("Paris",), 1.0),
        ("It is \\boxed{\\text{Paris}}.", ("Paris",), 1.0),
        ("\\boxed{Parish}", ("Paris",), 0.0),
    ],
)
async def test_cover_match_requires_whole_words_in_order(
    answer: str | None, golds: tuple[str, ...], score: float
) -> None:
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
        ("A", "A", 1.0),
        ("", "A", 0.0),
        ("the", "A", 0.0),
        ("", "", 0.0),
    ],
)
def test_f1_counts_words_as_a_multiset(answer: str, gold: str, score: float) -> None:
    assert f1(answer, gold) == pytest.approx(score)


async def test_f1_takes_the_best_gold_answer_and_none_is_zero() -> None:
    assert await F1()(outcome("austen", "Charlotte Bronte", "Jane Austen", "Austen")) == 1.0
    assert await F1()(outcome(None, "austen")) == 0.0
    assert await F1()(outcome("austen")) == 0.0
