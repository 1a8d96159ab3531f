"""What a question's searches should bring, and which of it a turn was shown. Pure; for rewards that look at retrieval.

There are up to 1 + n targets: the gold answer, as words in a passage as it was shown (cut, escaped), and each of
the n supporting passages that the question names in `meta["supporting_ids"]`, comma-separated ids or titles. The gold
answers yes, no and noanswer stand in any text and prove nothing, so they are no target. Only passages count: neither
what the policy wrote itself nor the environment's own words can be a hit.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

from protocol.messages import Question
from rollout_server.environment.actions import fold_text
from rollout_server.rewards.base import RewardInput, RewardSettingsBase, TurnText
from rollout_server.rewards.text_match import contains_phrase, covers, normalise

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
    if by != "passage" and _stands(_golds(question), fold_text(turn.observation)):
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
    return any(contains_phrase(read, words) for words in map(_words, golds) if words)


def _words(text: str) -> str:
    """Letters, digits and the marks on them; all else is blank."""
    return " ".join(
        "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text.casefold()).split()
    )


def _golds(question: Question) -> tuple[str, ...]:
    # Both sides are folded: a passage may write "ﬁ" for "fi".
    return tuple(fold_text(gold) for gold in question.answers if normalise(gold) not in _UNTELLING)


def _supporting(question: Question) -> set[str]:
    names = str(question.meta.get("supporting_ids") or "").split(",")
    return {name.strip() for name in names} - {""}


def _passage(name: str) -> str:
    return f"passage {name}"


class RetrievalHit:
    """1 when one target was shown, 0 when none was or there is none; with `share`, the share of targets shown.

    With `by: answer`: Search-R1's `is_retrieval_correct` (`qa_em_format.py`), on passages only and by whole words.
    """

    name = "retrieval_hit"

    def __init__(self, settings: RetrievalHitSettings) -> None:
        self._by, self._share = settings.by, settings.share

    async def __call__(self, outcome: RewardInput) -> float:
        wanted = targets(outcome.question, self._by)
        hits = frozenset[str]().union(*(found(outcome.question, turn, self._by) for turn in outcome.turns))
        if not wanted:
            return 0.0
        return len(hits) / len(wanted) if self._share else float(bool(hits))


class RetrievalHitSettings(RewardSettingsBase):
    """1 when the gold answer or a supporting passage stood in an observation."""

    type: Literal["retrieval_hit"] = "retrieval_hit"
    by: By = "either"
    """What is looked for: `answer` (gold answer in the text), `passage` (ids or titles in the question's
    `supporting_ids`), or `either`."""
    share: bool = False
    """Score the share of what is looked for, not whether any of it was shown."""


class TurnRetrieval:
    """New targets of each turn as a share of all targets.

    The sum over the turns is at most 1, and finding the same again earns nothing, so searching more is no way to more.
    """

    name = "turn_retrieval"

    def __init__(self, settings: TurnRetrievalSettings) -> None:
        self._by = settings.by

    async def per_turn(self, outcome: RewardInput) -> Sequence[float]:
        wanted = targets(outcome.question, self._by)
        seen: set[str] = set()
        earned = []
        for turn in outcome.turns:
            new = found(outcome.question, turn, self._by) - seen
            seen |= new
            earned.append(len(new) / len(wanted) if wanted else 0.0)
        return earned


class TurnRetrievalSettings(RewardSettingsBase):
    """Each turn earns the share of gold answer and supporting passages that it was the first to bring."""

    type: Literal["turn_retrieval"] = "turn_retrieval"
    by: By = "either"
    """What is looked for: `answer`, `passage` (the question's `supporting_ids`) or `either`."""
