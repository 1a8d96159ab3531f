"""What to evaluate: named suites, files of questions, and the data sets in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.data.questions import load_questions
from protocol.errors import UserError
from protocol.messages import Question

SUITES: dict[str, dict[str, str]] = {
    "search-r1": {
        "nq": "test",
        "triviaqa": "test",
        "popqa": "test",
        "hotpotqa": "dev",
        "2wikimultihopqa": "dev",
        "musique": "dev",
        "bamboogle": "test",
    },
    "research": {
        "hotpotqa": "dev",
        "2wikimultihopqa": "dev",
        "musique": "dev",
        "bamboogle": "test",
        "strategyqa": "train",  # the test set has no answers
    },
}
"""Suite -> data set -> split: as in Search-R1's `qa_search_test_merge.py`, or as in ReSearch with StrategyQA."""
ENDINGS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")


@dataclass(frozen=True)
class DataSet:
    """Questions of one data set. `fingerprint`: sha256 over ids, texts and answers."""

    name: str
    questions: tuple[Question, ...]
    fingerprint: str


def read_suites(given: Sequence[str], data: Path, limit: int | None = None) -> list[DataSet]:
    """Return the data sets of suites and files, in order.

    given  names of SUITES, files, or NAME=FILE. Without a NAME, the records name their data set, else the file does
    data   directory with the files of the suites: DATA/NAME/SPLIT.jsonl or DATA/NAME_SPLIT.jsonl (or .parquet, ..)
    limit  use only the first questions of each data set

    Raises UserError for a missing or unreadable file, and if two files have a data set in common.
    """
    found: dict[str, list[Question]] = {}
    for name, path in (pair for one in given for pair in _files(one, data)):
        sets: dict[str, list[Question]] = {}
        for question in load_questions(path).questions:
            sets.setdefault(name or _named(question, path), []).append(question)
        if twice := found.keys() & sets.keys():
            raise UserError(
                f"two files have the data set {min(twice)!r}", todo=f"name one of them: --suite NAME={path}"
            )
        found |= sets
    return [data_set(name, questions[:limit]) for name, questions in found.items()]


def data_set(name: str, questions: Iterable[Question]) -> DataSet:
    """Return the questions as a data set. Raises UserError if two have one id."""
    kept = tuple(questions)
    seen: set[str] = set()
    for question in kept:
        if question.id in seen:
            raise UserError(
                f"the data set {name!r} has two questions with the id {question.id!r}",
                why="an episode is stored and paired by the id of its question",
                todo="give each question its own id",
            )
        seen.add(question.id)
    digest = hashlib.sha256()
    for question in kept:
        digest.update(json.dumps([question.id, question.text, list(question.answers)]).encode() + b"\n")
    return DataSet(name, kept, digest.hexdigest())


def _named(question: Question, path: Path) -> str:
    return str(question.meta.get("source") or question.meta.get("dataset") or path.name.partition(".")[0])


def _files(given: str, data: Path) -> list[tuple[str, Path]]:
    """Return (name of the data set or "", file) for a suite or a file. Raises UserError if a file is missing."""
    if given in SUITES:
        return [(name, _file_of(name, split, data, given)) for name, split in SUITES[given].items()]
    if Path(given).is_file():
        return [("", Path(given))]
    name, equals, file = given.partition("=")
    if equals and name and Path(file).is_file():
        return [(name, Path(file))]
    raise UserError(
        f"cannot read the questions {given}",
        why="there is no such file, and no suite of this name",
        todo=f"give --suite a file of questions, NAME=FILE, or one of {', '.join(SUITES)}",
    )


def _file_of(name: str, split: str, data: Path, suite: str) -> Path:
    """Return the file of a data set below `data`. Raises UserError if there is none."""
    stems = (data / name / split, data / f"{name}_{split}", data / f"{name}-{split}", data / name)
    for stem in stems:
        for ending in ENDINGS:
            if (path := stem.with_name(stem.name + ending)).is_file():
                return path
    raise UserError(
        f"the suite {suite} needs the data set {name} ({split}), which is not in {data}",
        why=f"none of the files {', '.join(f'{stem}.*' for stem in stems)} exists",
        todo=f"foray data get {name} --to {data}, or give another directory with --data DIR",
    )
