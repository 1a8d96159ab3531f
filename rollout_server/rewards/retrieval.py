"""Retrieval rewards: the targets of a question's searches, and which of them a turn was shown. Pure.

There are up to 1 + n targets: the gold answer, as words in a passage as shown (cut, escaped), and each of the n
supporting passages in the question's `meta["supporting_ids"]` (ids or titles). The gold answers yes, no
and noanswer occur in any text and are not targets. Only passages count, not text of the policy or the environment.
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
"""answer: the gold answer. passage: the supporting passages. either: both."""
_UNTELLING = frozenset({"", "yes", "no", "noanswer"})
_ANSWER = "answer"


def targets(question: Question, by: By) -> frozenset[str]:
    """Return the names of the question's targets; empty if it has none."""
    answer = {_ANSWER} if by != "passage" and _golds(question) else set()
    return frozenset(answer | ({_passage(name) for name in question.supporting} if by != "answer" else set()))


def found(question: Question, turn: TurnText, by: By) -> frozenset[str]:
    """Return the targets that the turn's observation showed to the policy."""
    hits = set()
    if by != "passage" and _stands(_golds(question), fold_text(turn.observation)):
        hits.add(_ANSWER)
    if by != "answer":
        titles = {normalise(title) for title in turn.titles} - {""}
        shown = {n for n in question.supporting if n in turn.passage_ids or normalise(n) in titles}
        hits |= {_passage(name) for name in shown}
    return frozenset(hits)


def _stands(golds: tuple[str, ...], text: str) -> bool:
    """Return whether a gold answer occurs in a passage.

    Compares Search-R1's words, and also words split at punctuation: Search-R1 only deletes punctuation, and so misses
    "Austen" in "Austen's novel" and in "Austen/Brontë".
    """
    if covers(text, golds):
        return True
    read = _words(text)
    return any(contains_phrase(read, words) for words in map(_words, golds) if words)


def _words(text: str) -> str:
    """Return the text with all but letters, digits and combining marks replaced by spaces."""
    return " ".join(
        "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text.casefold()).split()
    )


def _golds(question: Question) -> tuple[str, ...]:
    # Both sides are folded: a passage may contain "ﬁ" for "fi".
    return tuple(fold_text(gold) for gold in question.answers if normalise(gold) not in _UNTELLING)


def _passage(name: str) -> str:
    return f"passage {name}"


class RetrievalHit:
    """Scores 1 if a target was shown, else 0 (also without targets); with `share`, the share of targets shown.

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


class EvidenceSettings(RewardSettingsBase):
    """Settings of rewards for evidence in the observations."""

    by: By = "either"
    """Targets: `answer` (gold answer in the text), `passage` (ids or titles in the question's `supporting_ids`), or
    `either`."""

    @property
    def reads_passages(self) -> bool:
        return True


class RetrievalHitSettings(EvidenceSettings):
    """1 if the gold answer or a supporting passage was in an observation, else 0."""

    type: Literal["retrieval_hit"] = "retrieval_hit"
    share: bool = False
    """Score the share of targets that were shown, instead of 1 for any."""


class TurnRetrieval:
    """Scores each turn by the share of all targets that it shows for the first time.

    The sum over the turns is at most 1, and finding a target again scores 0, so more searches alone do not pay.
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


class TurnRetrievalSettings(EvidenceSettings):
    """Each turn scores the share of targets (gold answer, supporting passages) that it is the first to show."""

    type: Literal["turn_retrieval"] = "turn_retrieval"
