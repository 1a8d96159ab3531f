"""HotpotQA's own files and their copy on the Hugging Face hub; 2WikiMultihopQA's own layout, which extends them.

2WikiMultihopQA's fields are those of its documentation (github.com/Alab-NII/2wikimultihop). Its aliases of answers are
in a separate file (`id_aliases.json`), which is not read.
"""

from __future__ import annotations

from typing import Any

from learner.data.formats.base import Asked, QuestionFormat, golds_of, id_of, meta_of, text_of
from protocol.runtime.records import Record


def _read(record: Record) -> Asked:
    if "answer" not in record:
        raise ValueError("no `answer`: the test split has none")
    return Asked(
        id_of(record),
        text_of(record),
        golds_of(record["answer"], "answer"),
        meta=meta_of(record),
        supporting=_titles(record.get("supporting_facts")),
    )


def _titles(facts: Any) -> tuple[str, ...]:
    """Return the titles of `[[title, sentence], ..]`, or of the hub's `{"title": [..], "sent_id": [..]}`."""
    titles = facts.get("title") if isinstance(facts, dict) else [fact[0] for fact in facts or () if fact]
    return tuple(dict.fromkeys(str(title) for title in titles or ()))


HOTPOTQA = QuestionFormat(
    '{"_id", "question", "answer", "supporting_facts", "context"}: HotpotQA',
    lambda record: "supporting_facts" in record,
    _read,
    "hotpotqa",
)
TWOWIKI = QuestionFormat(
    'HotpotQA\'s fields and "evidences": 2WikiMultihopQA (schema only)',
    lambda record: "evidences" in record and "question" in record,
    _read,
    "2wikimultihopqa",
)
