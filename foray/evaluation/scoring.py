"""Score one answer: metrics, whether evidence was found, and why a wrong answer is wrong. Pure.

The same functions score every method and target, whatever rewards a run has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from protocol.messages import Question
from rollout_server.rewards.base import TurnText
from rollout_server.rewards.retrieval import found, targets
from rollout_server.rewards.text_match import covers

Failure = Literal["", "no_search", "no_evidence", "evidence_ignored", "evidence_unknown", "format"]
FAILURES: Mapping[Failure, str] = {
    "format": "no answer in the expected form",
    "no_search": "wrong, and nothing was searched for",
    "no_evidence": "wrong, and no passage that was read contains the answer or is a supporting one",
    "evidence_ignored": "wrong, although a passage that was read contains the answer or is a supporting one",
    "evidence_unknown": "wrong after a search, and the question does not tell what evidence is (yes or no)",
}
"""Class of a wrong answer -> its meaning, in the order of reports."""


def has_evidence(question: Question, segments: Sequence[Mapping[str, Any]]) -> bool | None:
    """Return whether a passage that was read contains a gold answer or is a supporting one; None if that is unknown.

    segments  of an episode: `owner`, `text`, `passage_ids`, and `titles` where they are known
    """
    if not targets(question, "either"):
        return None
    turns = (
        TurnText(
            "",
            observation=str(segment.get("text", "")),
            passage_ids=tuple(map(str, segment.get("passage_ids", ()))),
            titles=tuple(map(str, segment.get("titles") or _named_in(str(segment.get("text", "")), question))),
        )
        for segment in segments
        # the words around the passages are the environment's, and no evidence
        if segment.get("owner") == "environment" and segment.get("passage_ids")
    )
    return any(found(question, turn, "either") for turn in turns)


def _named_in(text: str, question: Question) -> list[str]:
    """Return the supporting passages that a text names: episodes of a rollout server have ids and no titles."""
    return [name for name in question.supporting if covers(text, (name,))]


def failure_of(*, correct: bool, answer: str | None, searches: int, evidence: bool | None) -> Failure:
    """Return the class of a wrong answer, "" for a correct one. One class each, the first that applies."""
    if correct:
        return ""
    if answer is None or not answer.strip():
        return "format"
    if not searches:
        return "no_search"
    if evidence is None:
        return "evidence_unknown"
    return "evidence_ignored" if evidence else "no_evidence"


def is_correct(metrics: Mapping[str, float]) -> bool:
    """Return whether the headline metric counts the answer as right."""
    return metrics["yes_no" if "yes_no" in metrics else "em"] == 1.0
