"""Exact match, cover match and token F1, the best over all gold answers.

Normalisation is Search-R1's (`verl/utils/reward_score/qa_em.py`).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rollout_server.rewards.base import RewardInput, RewardSettingsBase, WithoutOptions

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
YES_NO = frozenset({"yes", "no"})
_TRUTH = {"yes": "yes", "true": "yes", "no": "no", "false": "no"}


def normalise(text: str) -> str:
    """Lower-case, drop ASCII punctuation, drop the articles a, an, the, collapse white space: in this order."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def comparable(text: str) -> str:
    """Return `normalise(text)`. If that is empty, keep the articles, then the punctuation: "A" is an answer.

    Empty only for an empty text.
    """
    return normalise(text) or " ".join(text.lower().translate(_PUNCTUATION).split()) or " ".join(text.lower().split())


def answers_match(answer: str, gold: str) -> bool:
    """Return whether the answers match. An empty one never does: in Search-R1 and HotpotQA it matches the gold "A"."""
    given = comparable(answer)
    return bool(given) and given == comparable(gold)


class ExactMatch(WithoutOptions):
    """1 if the answer equals a gold answer after normalisation, else 0."""

    name = "em"

    async def __call__(self, outcome: RewardInput) -> float:
        if outcome.answer is None:
            return 0.0
        return float(any(answers_match(outcome.answer, gold) for gold in outcome.question.answers))


class ExactMatchSettings(RewardSettingsBase):
    """1 if the answer equals a gold answer after normalisation, else 0."""

    type: Literal["em"] = "em"


_COMMAND = re.compile(r"\\[a-zA-Z]+\s*\{")
_UNSPACED = re.compile(
    # Thai, Lao, Tibetan and Burmese; Khmer; Tai Le; Tai Tham; Balinese
    "[\u0e00-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f"
    # radicals of Han, kana, bopomofo; Han and Yi; Javanese, Burmese, Tai Viet; Han; kana of half width
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\ua4cf\ua980-\ua9ff\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)
"""Characters of scripts that put no spaces between words, by the blocks of Unicode 16. Hangul is not among them."""


class CoverMatch(WithoutOptions):
    """1 if the words of a gold answer occur consecutively in the answer, else 0 (Search-R1: `subem_check`).

    Compares whole words, unlike Search-R1's substring: "I do not know" does not cover the gold answer "no". In scripts
    without spaces (Chinese, Japanese, Thai, Khmer, ...) it is a substring, as in Search-R1. As there, `\\boxed{Paris}`
    covers Paris.
    """

    name = "cover_em"

    async def __call__(self, outcome: RewardInput) -> float:
        if outcome.answer is None:
            return 0.0
        return float(covers(_COMMAND.sub(" ", outcome.answer), outcome.question.answers))


def covers(text: str, golds: tuple[str, ...]) -> bool:
    """Return whether the words of a gold answer occur in `text`. One that normalises to "" must be equal to it."""
    normal = normalise(text)
    return any(
        contains_phrase(normal, normalise(gold)) if normalise(gold) else answers_match(text, gold) for gold in golds
    )


def contains_phrase(text: str, words: str) -> bool:
    """Return whether `words` (not empty) occur in `text` as whole words. Both are normalised."""
    at = text.find(words)
    while at >= 0:
        end = at + len(words)
        starts = not at or not (_spaced(text[at - 1]) and _spaced(words[0]))
        # a combining mark belongs to the letter before it, in any script
        if starts and (end == len(text) or not (_mark(text[end]) or (_spaced(words[-1]) and _spaced(text[end])))):
            return True
        at = text.find(words, at + 1)
    return False


def _mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M"


def _spaced(character: str) -> bool:
    """Return whether the character is a digit, or a letter of a script that separates words by spaces."""
    return (character.isalnum() or _mark(character)) and not _UNSPACED.match(character)


class CoverMatchSettings(RewardSettingsBase):
    """1 if a gold answer occurs in the answer as whole words, else 0."""

    type: Literal["cover_em"] = "cover_em"


_WHOLE = frozenset({"yes", "no", "noanswer"})


def f1(answer: str, gold: str) -> float:
    """Return 2PR / (P + R) over the multisets of normalised words. yes, no and noanswer must match exactly."""
    given, wanted = comparable(answer), comparable(gold)
    if given != wanted and (given in _WHOLE or wanted in _WHOLE):
        return 0.0
    words, gold_words = given.split(), wanted.split()
    common = sum((Counter(words) & Counter(gold_words)).values())
    # 2PR / (P + R) with P = common / n and R = common / m is 2 common / (n + m)
    return 2 * common / (len(words) + len(gold_words)) if common else 0.0


class F1(WithoutOptions):
    """The best token F1 over the gold answers (HotpotQA's, as in ReSearch's `re_search.py`); 0 without an answer."""

    name = "f1"

    async def __call__(self, outcome: RewardInput) -> float:
        if outcome.answer is None:
            return 0.0
        return max((f1(outcome.answer, gold) for gold in outcome.question.answers), default=0.0)


class F1Settings(RewardSettingsBase):
    """Token F1 against the best gold answer."""

    type: Literal["f1"] = "f1"


def is_yes_no(golds: Sequence[str]) -> bool:
    """Return whether the gold answers are yes or no, as in StrategyQA."""
    return bool(golds) and all(comparable(gold) in YES_NO for gold in golds)


def yes_no(answer: str, golds: Sequence[str]) -> float:
    """Return 1 if the answer says the gold yes or no with its first word (true and false count too), else 0."""
    first = comparable(answer).partition(" ")[0]
    return float(_TRUTH.get(first) in {comparable(gold) for gold in golds})


def score(answer: str | None, golds: Sequence[str]) -> dict[str, float]:
    """Return em, f1 and cover_em of an answer, and yes_no if the gold answers are yes or no.

    The formulas are those of the rewards of these names: Search-R1's exact match, HotpotQA's token F1, cover match of
    whole words. Without an answer all are 0.
    """
    said = answer or ""
    given = answer is not None and bool(golds)
    values = {
        "em": float(given and any(answers_match(said, gold) for gold in golds)),
        "f1": max((f1(said, gold) for gold in golds), default=0.0) if given else 0.0,
        "cover_em": float(given and covers(said, tuple(golds))),
    }
    return values | ({"yes_no": yes_no(said, golds) if given else 0.0} if is_yes_no(golds) else {})
