"""Records with a question and its answers under the usual names: Foray, FlashRAG, NQ-open, and your own columns."""

from __future__ import annotations

from learner.data.formats.base import (
    ANSWER_FIELDS,
    Asked,
    QuestionFormat,
    golds_of,
    id_of,
    meta_of,
    source_of,
    text_of,
)
from protocol.runtime.records import Record
from protocol.runtime.settings_errors import suggest


def _read(record: Record) -> Asked:
    text = text_of(record)
    for name in ANSWER_FIELDS:
        if name in record:
            supporting = record.get("supporting_ids") or _listed_names(record.get("supporting"))
            names = supporting.split(",") if isinstance(supporting, str) else supporting
            return Asked(
                id_of(record),
                text,
                golds_of(record[name], name),
                source_of(record),
                meta_of(record),
                tuple(str(item).strip() for item in names),
            )
    raise ValueError(f"no answer: none of the fields {', '.join(ANSWER_FIELDS)}")


def _listed_names(value: object) -> list[str]:
    """Return a list of ids or titles; [] for what another format keeps in that field."""
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else []


FORAY = QuestionFormat(
    '{"question", "answers"}, optionally "id", "source", "supporting_ids" or "supporting": Foray',
    lambda r: "answers" in r,
    _read,
)
FLASHRAG = QuestionFormat('{"id", "question", "golden_answers"}: FlashRAG', lambda r: "golden_answers" in r, _read)
NQ_OPEN = QuestionFormat(
    '{"question", "answer": [..] or ".."}: NQ-open and many dumps', lambda r: "answer" in r and "question" in r, _read
)
POPQA = QuestionFormat(
    '{"question", "possible_answers": a list as text}: PopQA (schema only)',
    lambda r: "possible_answers" in r,
    _read,
    "popqa",
)


def columns(question: str, answers: str, id_: str = "") -> QuestionFormat:
    """Return the format of records with the question and the answers in columns of your own."""

    def read(record: Record) -> Asked:
        for name in (question, answers):
            if name not in record:
                raise ValueError(f"no column `{name}`: {suggest(name, list(map(str, record)))}")
        golds = golds_of(record.get(answers), answers)
        return Asked(id_of(record, *([id_] if id_ else [])), text_of(record, question), golds, source_of(record))

    return QuestionFormat(f"`{question}` and `{answers}`", lambda record: question in record, read)
