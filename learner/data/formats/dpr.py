"""DPR's files: training data with passages (JSON), and questions with answers (a table without a header)."""

from __future__ import annotations

from learner.data.formats.base import Asked, QuestionFormat, golds_of, id_of, listed, source_of, text_of
from protocol.runtime.records import Record


def _read(record: Record) -> Asked:
    golds = record.get("answers")
    if isinstance(golds, str) and (golds := listed(golds)) is None:
        raise ValueError("`answers` is not a list in Python's notation")
    # `nq_train_psgs_w100` in the training data, `nq_dev_psgs_w100` in the dev data
    source = source_of(record).partition("_")[0]
    return Asked(id_of(record), text_of(record), golds_of(golds, "answers"), source)


def _fits(record: Record) -> bool:
    answers = record.get("answers")
    return "positive_ctxs" in record or (isinstance(answers, str) and answers.lstrip().startswith("["))


DPR = QuestionFormat(
    '{"question", "answers", "positive_ctxs"}, or a table of question and [\'answer\', ..]: DPR (schema only)',
    _fits,
    _read,
)
