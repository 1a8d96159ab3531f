"""Rows as Search-R1's `scripts/data_process/*.py` write them for verl.

`data_source`, `prompt` (a list of one user message: template and question), `ability`,
`reward_model.ground_truth.target` (the gold answers), `extra_info` (`split`, `index`). Scripts that map a FlashRAG data
set keep its columns `id`, `question` and `golden_answers` beside them.
"""

from __future__ import annotations

from typing import Any

from learner.data.formats.base import Asked, QuestionFormat, golds_of, id_of, source_of, text_of
from protocol.runtime.records import Record

_BEFORE = "Question: "
"""Ends Search-R1's template: the question follows."""


def _read(record: Record) -> Asked:
    source, extra = source_of(record), _mapping(record.get("extra_info"))
    split, index = extra.get("split"), extra.get("index")
    # ids of several data sets in one file repeat: FlashRAG numbers each from 0, and so does `index`
    number = "" if index is None else "-".join(str(part) for part in (split, index) if part is not None)
    name = id_of(record, "id") or number
    return Asked(
        "/".join(part for part in (source, name) if part) if name else "",
        _question(record, extra),
        _golds(record),
        source,
        {"split": str(split)} if split else {},
    )


def _question(record: Record, extra: dict[str, Any]) -> str:
    for place in (record, extra):
        if place.get("question"):
            return text_of(place)
    prompt = record.get("prompt")
    messages = [message for message in prompt if isinstance(message, dict)] if isinstance(prompt, list) else []
    asked = [message.get("content") for message in messages if message.get("role") == "user"]
    if not asked or not isinstance(asked[-1], str):
        raise ValueError("no `question`, and no user message in `prompt`")
    text = asked[-1].rpartition(_BEFORE)[2].strip()
    if not text:
        raise ValueError("the user message in `prompt` holds no question")
    return text


def _golds(record: Record) -> tuple[str, ...]:
    truth = _mapping(record.get("reward_model")).get("ground_truth")
    target = truth.get("target") if isinstance(truth, dict) else truth
    if target is not None:
        return golds_of(target, "reward_model.ground_truth.target")
    if "golden_answers" in record:
        return golds_of(record["golden_answers"], "golden_answers")
    raise ValueError("no `reward_model.ground_truth.target`")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


SEARCH_R1 = QuestionFormat(
    '{"data_source", "prompt", "reward_model": {"ground_truth": {"target"}}, "extra_info"}: Search-R1, verl',
    lambda record: "reward_model" in record and "prompt" in record,
    _read,
)
