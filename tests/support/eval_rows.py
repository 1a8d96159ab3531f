"""Made-up results of `foray eval`."""

from __future__ import annotations

from typing import Any

from foray.evaluation.runner import row_of
from foray.evaluation.store import Row
from protocol.messages import Question


def make_row(
    question: int,
    *,
    right: bool,
    method: str = "policy",
    data_set: str = "nq",
    index: int = 0,
    text: str = "",
    golds: tuple[str, ...] = ("x",),
    answer: str | None = None,
    **found: Any,
) -> Row:
    """One episode: its answer is the gold one, or another."""
    asked = Question(id=f"q{question}", text=text or f"question {question}?", answers=golds)
    given: dict[str, Any] = {
        "answer": answer or (golds[0] if right else "another"),
        "status": "answered",
        "cause": "",
        "version": "1.0",
        "searches": 1,
        "turns": 2,
        "tokens_generated": 10,
        "tokens_read": 100,
        "seconds": 0.5,
        "segments": [
            {"owner": "policy", "text": "<answer>"},
            {"owner": "environment", "text": "y", "passage_ids": ["1"]},
        ],
    }
    return row_of(data_set, asked, method, index, given | found)


def make_recipe(**change: Any) -> dict[str, Any]:
    """The conditions of a made-up evaluation."""
    recipe: dict[str, Any] = {
        "format": 1,
        "foray": "0",
        "subject": {"kind": "model", "where": "m", "model": "abc"},
        "methods": {"policy": {"template": {"name": "search_r1", "sha256": "t"}}, "rag": {"max_tokens": 64}},
        "limits": {"max_turns": 4},
        "sampler": {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1},
        "search": True,
        "retriever": {"topk": 3, "fingerprint": "f"},
        "data": {"nq": {"questions": 4, "fingerprint": "d"}},
        "judge": None,
    }
    return recipe | change
