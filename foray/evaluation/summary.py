"""From episodes to the numbers of a report: means with intervals, paired tests, failures. Pure.

A failed episode (the engine or the retriever failed) says nothing about the policy: it is counted and left out of every
mean. So is an episode whose prompt did not fit the context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from foray.evaluation.scoring import FAILURES
from foray.evaluation.statistics import Estimate, PairedTest, interval, paired_test
from foray.evaluation.store import Row
from protocol.runtime.episodes import is_failed, is_too_long

METRICS = ("em", "f1", "cover_em", "yes_no", "judge")
COSTS = ("searches", "tokens_generated", "tokens_read", "seconds")
"""Means a question, without intervals."""
REFERENCE = "policy"
"""The method that the others are compared with, if it was evaluated."""

ByQuestion = dict[str, dict[str, float]]
"""Data set -> question -> mean over its episodes."""


@dataclass(frozen=True)
class Cell:
    """One method on one data set."""

    method: str
    data_set: str
    metrics: dict[str, Estimate]
    costs: dict[str, float]
    failures: dict[str, int]
    """Class of a wrong answer -> episodes, for those that occurred."""
    episodes: int
    failed: int
    too_long: int
    headline: str
    """The metric that decides whether an answer is right: em, or yes_no."""


@dataclass(frozen=True)
class Comparison:
    """A paired test of one metric: `second` minus `first`, on the questions of both."""

    metric: str
    first: str
    second: str
    test: PairedTest
    data_set: str = ""
    """"": the mean over the data sets."""


@dataclass(frozen=True)
class Summary:
    """The numbers of one result."""

    cells: tuple[Cell, ...]
    averages: dict[str, dict[str, Estimate]]
    """Method -> metric -> mean over the data sets; for several data sets."""
    comparisons: tuple[Comparison, ...]
    versions: dict[str, int] = field(default_factory=dict)
    """Policy version -> valid episodes; several versions make the scores invalid."""

    @property
    def mixed(self) -> bool:
        """Return whether episodes of several policy versions were scored together."""
        return len(self.versions) > 1 or any("+" in version for version in self.versions)

    @property
    def failed(self) -> int:
        """Return the number of failed episodes."""
        return sum(cell.failed for cell in self.cells)


def summarise(rows: Sequence[Row], *, seed: int = 0) -> Summary:
    """Return the summary of the episodes of one result, methods and data sets in the order of the episodes."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    sets = list(dict.fromkeys(row["data_set"] for row in rows))
    by_place: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_place.setdefault((row["method"], row["data_set"]), []).append(row)
    cells = tuple(
        _cell(method, name, by_place[method, name], seed)
        for method in methods
        for name in sets
        if (method, name) in by_place
    )
    reference = REFERENCE if REFERENCE in methods else methods[0] if methods else ""
    others = [method for method in methods if method != reference]
    compared = [compare(rows, rows, other, reference, seed=seed) for other in others]
    versions = Counter(
        str(row.get("version") or "") for row in rows if is_valid(row) and row.get("version") is not None
    )
    return Summary(
        cells,
        {method: _averages(rows, method, seed) for method in methods} if len(sets) > 1 else {},
        tuple(comparison for found in compared for comparison in found),
        dict(sorted(versions.items())),
    )


def compare(
    first: Sequence[Row],
    second: Sequence[Row],
    first_method: str,
    second_method: str,
    *,
    labels: tuple[str, str] | None = None,
    seed: int = 0,
) -> list[Comparison]:
    """Return the paired tests of two methods (of one result or of two): for each data set, and over all.

    Only questions with valid episodes and the same text on both sides are compared. The metric is `judge` if both have
    it, else the headline of the data set (over all: `correct`, the mean of the headlines).
    """
    labels = labels or (first_method, second_method)
    left, right = (
        [row for row in rows if row["method"] == name]
        for rows, name in ((first, first_method), (second, second_method))
    )
    found = []
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    names = [
        name for name in dict.fromkeys(row["data_set"] for row in left) if any(r["data_set"] == name for r in right)
    ]
    for name in names:
        metric = _compared_metric(left, right, name)
        one, two = (_by_question(rows, metric, texts=True).get(name, {}) for rows in (left, right))
        common = sorted(one.keys() & two.keys())
        if not common:
            continue
        pairs[name] = [one[q] for q in common], [two[q] for q in common]
        test = paired_test({name: pairs[name][0]}, {name: pairs[name][1]}, seed=seed)
        found.append(Comparison(metric, *labels, test, name))
    if len(pairs) > 1:
        test = paired_test({n: p[0] for n, p in pairs.items()}, {n: p[1] for n, p in pairs.items()}, seed=seed)
        found.append(Comparison("correct", *labels, test))
    return found


def _cell(method: str, data_set: str, rows: Sequence[Row], seed: int) -> Cell:
    valid = [row for row in rows if is_valid(row)]
    metrics = {
        metric: interval(_values(_by_question(valid, metric)), seed=seed)
        for metric in METRICS
        if any(metric in row["metrics"] for row in valid)
    }
    counts = Counter(row["failure"] for row in valid)
    return Cell(
        method,
        data_set,
        metrics,
        {name: _mean(float(row.get(name) or 0.0) for row in valid) for name in COSTS},
        {name: counts[name] for name in FAILURES if counts[name]},
        len(rows),
        sum(map(is_failed, rows)),
        sum(map(is_too_long, rows)),
        _headline(valid),
    )


def _averages(rows: Sequence[Row], method: str, seed: int) -> dict[str, Estimate]:
    mine = [row for row in rows if row["method"] == method and is_valid(row)]
    return {
        metric: interval(_values(_by_question(mine, metric)), seed=seed)
        for metric in ("em", "f1", "cover_em", "judge")
        if any(metric in row["metrics"] for row in mine)
    }


def is_valid(row: Row) -> bool:
    """Return whether the policy itself ended the episode, so that it counts."""
    return not (is_failed(row) or is_too_long(row))


def _headline(rows: Sequence[Row]) -> str:
    """Return yes_no if every question has it, as in StrategyQA; else em."""
    return "yes_no" if rows and all("yes_no" in row["metrics"] for row in rows) else "em"


def _compared_metric(left: Sequence[Row], right: Sequence[Row], data_set: str) -> str:
    rows = [row for row in (*left, *right) if row["data_set"] == data_set and is_valid(row)]
    return "judge" if rows and all("judge" in row["metrics"] for row in rows) else _headline(rows)


def _by_question(rows: Iterable[Row], metric: str, *, texts: bool = False) -> ByQuestion:
    """Return the mean over the valid episodes of each question. texts: the text is part of a question's key."""
    collected: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if is_valid(row) and metric in row["metrics"]:
            key = f"{row['question_id']}\0{row['question']}" if texts else str(row["question_id"])
            collected.setdefault(row["data_set"], {}).setdefault(key, []).append(float(row["metrics"][metric]))
    return {name: {key: _mean(values) for key, values in found.items()} for name, found in collected.items()}


def _values(by_question: ByQuestion) -> Mapping[str, list[float]]:
    return {name: list(values.values()) for name, values in by_question.items()}


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0
