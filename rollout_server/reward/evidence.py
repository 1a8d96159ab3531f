"""What a question's searches should bring, and which of it a turn was shown. Pure; for rewards that look at retrieval.

There are up to 1 + n targets: the gold answer, as words in a passage as it was shown (cut, neutralised), and each of
the n supporting passages that the question names in `meta["supporting_ids"]`, comma-separated ids or titles. The gold
answers yes, no and noanswer stand in any text and prove nothing, so they are no target. Only passages count: neither
what the policy wrote itself nor the environment's own words can be a hit.
"""

from __future__ import annotations

import unicodedata
from typing import Literal

from protocol.messages import Question
from rollout_server.actions import folded
from rollout_server.reward.base import TurnText
from rollout_server.reward.cover_em import covers, stands
from rollout_server.reward.exact_match import normalise

By = Literal["answer", "passage", "either"]
"""answer: the gold answer. passage: the supporting passages. either: all of them."""
_UNTELLING = frozenset({"", "yes", "no", "noanswer"})
_ANSWER = "answer"


def targets(question: Question, by: By) -> frozenset[str]:
    """Names of everything that counts as found; empty when the question has nothing of the kind."""
    answer = {_ANSWER} if by != "passage" and _golds(question) else set()
    return frozenset(answer | ({_passage(name) for name in _supporting(question)} if by != "answer" else set()))


def found(question: Question, turn: TurnText, by: By) -> frozenset[str]:
    """Those of `targets` that the turn's search brought before the policy's eyes."""
    hits = set()
    if by != "passage" and _stands(_golds(question), folded(turn.observation)):
        hits.add(_ANSWER)
    if by != "answer":
        titles = {normalise(title) for title in turn.titles} - {""}
        shown = {n for n in _supporting(question) if n in turn.passage_ids or normalise(n) in titles}
        hits |= {_passage(name) for name in shown}
    return frozenset(hits)


def _stands(golds: tuple[str, ...], text: str) -> bool:
    """Whether a gold answer stands in a passage. Besides Search-R1's words, which lose "Austen" in "Austen's novel"
    and in "Austen/Brontë" because punctuation only vanishes, words as a reader sees them."""
    if covers(text, golds):
        return True
    read = _words(text)
    return any(stands(read, words) for words in map(_words, golds) if words)


def _words(text: str) -> str:
    """Letters, digits and the marks on them; all else is blank."""
    return " ".join(
        "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text.casefold()).split()
    )


def _golds(question: Question) -> tuple[str, ...]:
    # Both sides are folded: a passage may write "ﬁ" for "fi".
    return tuple(folded(gold) for gold in question.answers if normalise(gold) not in _UNTELLING)


def _supporting(question: Question) -> set[str]:
    names = str(question.meta.get("supporting_ids") or "").split(",")
    return {name.strip() for name in names} - {""}


def _passage(name: str) -> str:
    return f"passage {name}"
