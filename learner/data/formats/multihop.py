"""Data sets of multi-hop questions with files of their own: MuSiQue, StrategyQA, and SimpleDeepSearcher's copies."""

from __future__ import annotations

from learner.data.formats.base import Asked, QuestionFormat, golds_of, id_of, source_of, text_of
from protocol.runtime.records import Record


def _musique(record: Record) -> Asked | None:
    """MuSiQue-Full has questions whose supporting paragraphs were removed: they have no answer in the corpus."""
    if record.get("answerable") is False:
        return None
    if "answer" not in record:
        raise ValueError("no `answer`: the test split has none")
    golds = [record["answer"], *(record.get("answer_aliases") or ())]
    paragraphs = record.get("paragraphs") or ()
    supporting = dict.fromkeys(str(part["title"]) for part in paragraphs if part.get("is_supporting"))
    hops = len(record.get("question_decomposition") or ())
    return Asked(
        id_of(record),
        text_of(record),
        golds_of(golds, "answer and answer_aliases"),
        meta={"hops": hops} if hops else {},
        supporting=tuple(supporting),
    )


MUSIQUE = QuestionFormat(
    '{"id", "question", "answer", "answer_aliases", "paragraphs"}: MuSiQue',
    lambda record: "answer_aliases" in record or "question_decomposition" in record,
    _musique,
    "musique",
)


def _strategyqa(record: Record) -> Asked:
    answer = record.get("answer")
    if not isinstance(answer, bool):
        raise ValueError("`answer` is not true or false: the test split has none")
    return Asked(id_of(record), text_of(record), ("yes" if answer else "no",))


STRATEGYQA = QuestionFormat(
    '{"qid", "question", "answer": true or false, "facts"}: StrategyQA; the gold answers are yes and no',
    lambda record: isinstance(record.get("answer"), bool) or ("qid" in record and "decomposition" in record),
    _strategyqa,
    "strategyqa",
)


def _simpledeepsearcher(record: Record) -> Asked:
    return Asked(
        id_of(record), text_of(record, "Question"), golds_of(record.get("answer"), "answer"), source_of(record)
    )


SIMPLEDEEPSEARCHER = QuestionFormat(
    '{"Question", "answer": [..], "source", "id"}: SimpleDeepSearcher',
    lambda record: "Question" in record,
    _simpledeepsearcher,
)
