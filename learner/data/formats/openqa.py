"""Formats of open-domain question sets: TriviaQA, SimpleQA and FRAMES.

TriviaQA's own files hold the records below `Data` (`protocol.runtime.records`), with names in capitals; its copy on the
Hugging Face hub has them in lower case. SimpleQA is a CSV file, FRAMES a TSV file.
"""

from __future__ import annotations

from typing import Any

from learner.data.formats.base import Asked, QuestionFormat, golds_of, id_of, text_of
from protocol.runtime.records import Record


def _triviaqa(record: Record) -> Asked:
    answer: Any = record.get("Answer", record.get("answer"))
    if not isinstance(answer, dict):
        raise ValueError("no `Answer` with `Value` and `Aliases`: the test split has none")
    names = ("Value", "Aliases") if "Value" in answer else ("value", "aliases")
    golds = (answer.get(names[0]) or "", *(answer.get(names[1]) or ()))
    return Asked(
        id_of(record, "QuestionId", "question_id"),
        text_of(record, "Question" if "Question" in record else "question"),
        golds_of(tuple(dict.fromkeys(golds)), "Answer"),
    )


TRIVIAQA = QuestionFormat(
    '{"Question", "QuestionId", "Answer": {"Value", "Aliases"}}, a list, or one below "Data": TriviaQA (schema only)',
    lambda record: isinstance(record.get("Answer", record.get("answer")), dict),
    _triviaqa,
    "triviaqa",
)
SIMPLEQA = QuestionFormat(
    '{"problem", "answer", "metadata"}: SimpleQA (schema only)',
    lambda record: "problem" in record and "answer" in record and "metadata" in record,
    lambda record: Asked(id_of(record), text_of(record, "problem"), golds_of(record.get("answer"), "answer")),
    "simpleqa",
)
FRAMES = QuestionFormat(
    '{"Prompt", "Answer", "reasoning_types", "wiki_links"}: FRAMES (schema only)',
    lambda record: "Prompt" in record and "Answer" in record,
    lambda record: Asked(id_of(record), text_of(record, "Prompt"), golds_of(record.get("Answer"), "Answer")),
    "frames",
)
