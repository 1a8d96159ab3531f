"""The report of a result as a document: scores, paired tests, failures, costs, published rows, recipe, examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from foray.evaluation.published import rows_for
from foray.evaluation.recipe import EvalRecipe, differences
from foray.evaluation.scoring import FAILURES
from foray.evaluation.statistics import LEVEL, RESAMPLES, Estimate, PairedTest
from foray.evaluation.store import Row
from foray.evaluation.summary import METRICS, REFERENCE, Cell, Comparison, Summary, compare
from foray.watch.page import Example, Measured, Report, ReportTable, Section
from foray.watch.records import leaves
from protocol.runtime.episodes import is_failed

EXAMPLES = 5
"""Examples of each class of failure, or one of each method if there are more methods."""
MOST_CHARS = 6000
"""Characters of a transcript in an example."""
NAMES = {"em": "EM", "f1": "F1", "cover_em": "cover EM", "yes_no": "yes/no", "judge": "judge"}
INTERVALS = (
    f"In brackets: {LEVEL:.0%} interval, bootstrap over questions, {RESAMPLES} resamples (Wilson's if every question "
    "has 0 or every one has 1); then the number of questions that have the score, if not all do."
)
TESTS = (
    "Difference of the second minus the first on the same questions; interval: paired bootstrap; p: two-sided "
    f"sign-flip test, {RESAMPLES} draws."
)


@dataclass(frozen=True)
class EvalResult:
    """A result: its name, recipe and episodes."""

    name: str
    recipe: EvalRecipe
    rows: Sequence[Row]


def document_of(result: EvalResult, summary: Summary, against: Sequence[EvalResult] = ()) -> Report:
    """Return the report of a result, with comparisons to other results."""
    settings = tuple((name, "-" if value is None else str(value)) for name, value in leaves(result.recipe))
    sections = [
        *_warnings(summary),
        Section("Scores", (INTERVALS,), _scores(summary)),
        *_compared("Methods compared", summary.comparisons),
        *(section for other in against for section in _against(result, other)),
        Section(
            "Wrong answers by cause", tuple(f"{_words(k)}: {v}." for k, v in FAILURES.items()), _failures(summary.cells)
        ),
        Section("Cost per question", (), _costs(summary.cells)),
        *_published(summary),
        Section("Recipe", (), ReportTable(("setting", "value"), settings)),
        *_examples(result.rows),
    ]
    facts = [(key, str(value)) for key, value in result.recipe["subject"].items() if value]
    if summary.versions:
        facts.append(("policy version", ", ".join(f"{v or 'unknown'} ({n})" for v, n in summary.versions.items())))
    return Report(f"Evaluation of {result.name}", tuple(sections), tuple(facts))


def to_json(result: EvalResult, summary: Summary, against: Sequence[EvalResult] = ()) -> dict[str, Any]:
    """Return the numbers of the report as JSON values; NaN as null."""
    comparisons = [*summary.comparisons, *(c for other in against for c in _comparisons(result, other))]
    return {
        "name": result.name,
        "protocol": result.recipe,
        "versions": summary.versions,
        "mixed_versions": summary.mixed,
        "scores": [
            {
                "method": cell.method,
                "data_set": cell.data_set,
                "episodes": cell.episodes,
                "failed": cell.failed,
                "too_long": cell.too_long,
                "headline": cell.headline,
                "metrics": {metric: _plain(vars(value)) for metric, value in cell.metrics.items()},
                "failures": cell.failures,
                **cell.costs,
            }
            for cell in summary.cells
        ],
        "averages": {
            method: {metric: _plain(vars(value)) for metric, value in found.items()}
            for method, found in summary.averages.items()
        },
        "comparisons": [
            {"metric": c.metric, "first": c.first, "second": c.second, "data_set": c.data_set, **_plain(vars(c.test))}
            for c in comparisons
        ],
        "protocol_differences": {other.name: differences(other.recipe, result.recipe) for other in against},
    }


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    return {key: None if math.isnan(value) else value for key, value in values.items()}


def _warnings(summary: Summary) -> list[Section]:
    found = []
    if summary.mixed:
        found.append("The episodes are of several policy versions: the scores are valid for none of them.")
    if summary.failed:
        found.append(f"{summary.failed} episodes failed and are left out: continue with --resume.")
    if too_long := sum(cell.too_long for cell in summary.cells):
        found.append(f"{too_long} prompts did not fit the context and are left out: raise rollout.episode.max_context.")
    return [Section("Warnings", tuple(found), warning=True)] if found else []


def _scores(summary: Summary) -> ReportTable:
    shown = [metric for metric in METRICS if any(metric in cell.metrics for cell in summary.cells)]
    rows = [
        (
            f"{cell.method}, {cell.data_set}",
            str(_questions(cell)),
            *(_measured(cell.metrics.get(m), _questions(cell)) for m in shown),
        )
        for cell in summary.cells
    ]
    rows += [
        (
            f"{method}, mean of {count} data set{'s' if count != 1 else ''}",
            "",
            *(_measured(found.get(m), max(estimate.n for estimate in found.values())) for m in shown),
        )
        for method, found in summary.averages.items()
        if (count := sum(bool(c.metrics) for c in summary.cells if c.method == method))
    ]
    return ReportTable(("method, data set", "questions", *(NAMES[metric] for metric in shown)), tuple(rows))


def _questions(cell: Cell) -> int:
    return max((estimate.n for estimate in cell.metrics.values()), default=0)


def _measured(value: Estimate | None, questions: int = 0) -> str | Measured:
    """Return a score. questions: number of the row; another one, as of yes/no questions, is shown with the score."""
    if value is None or math.isnan(value.mean):
        return "-"
    text = f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
    if questions and value.n != questions:
        text += f" of {value.n}"
    return Measured(text, value.mean, value.low, value.high)


def _compared(title: str, comparisons: Sequence[Comparison], notes: Sequence[str] = ()) -> list[Section]:
    if not comparisons:
        return []
    rows = tuple(
        (f"{c.first} -> {c.second}", c.data_set or "mean", c.metric, str(c.test.n), *_tested(c.test))
        for c in comparisons
    )
    header = ("first -> second", "data set", "metric", "questions", "difference", "interval", "p")
    return [Section(title, (*notes, TESTS), ReportTable(header, rows), warning=bool(notes))]


def _tested(test: PairedTest) -> tuple[str, str, str]:
    p = f"{test.p_value:.4f}" if test.p_value > 1 / RESAMPLES else f"< {2 / RESAMPLES:g}"
    return f"{test.difference:+.3f}", f"[{test.low:+.3f}, {test.high:+.3f}]", p


def _comparisons(result: EvalResult, other: EvalResult) -> list[Comparison]:
    """Return the tests of the same method in both, else of each method there with the reference method here."""
    here, there = (list(dict.fromkeys(row["method"] for row in side)) for side in (result.rows, other.rows))
    reference = REFERENCE if REFERENCE in here else here[0] if here else ""
    pairs = [(one, one) for one in there if one in here] + [(one, reference) for one in there if one not in here]
    return [
        comparison
        for first, second in pairs
        for comparison in compare(
            *(other.rows, result.rows, first, second), labels=(f"{other.name}: {first}", f"{result.name}: {second}")
        )
    ]


def _against(result: EvalResult, other: EvalResult) -> list[Section]:
    different = differences(other.recipe, result.recipe)
    notes = [f"The two were made under different conditions: {'; '.join(different)}."] if different else []
    found = _compared(f"Compared with {other.name}", _comparisons(result, other), notes)
    return found or [Section(f"Compared with {other.name}", ("The two have no question in common.",), warning=True)]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _failures(cells: Sequence[Cell]) -> ReportTable:
    rows = tuple(
        (f"{cell.method}, {cell.data_set}", *(str(cell.failures.get(name, 0)) for name in FAILURES), str(cell.failed))
        for cell in cells
    )
    return ReportTable(("method, data set", *map(_words, FAILURES), "failed"), rows)


def _costs(cells: Sequence[Cell]) -> ReportTable:
    rows = tuple(
        (
            f"{cell.method}, {cell.data_set}",
            f"{cell.costs['searches']:.2f}",
            f"{cell.costs['tokens_generated']:.0f}",
            f"{cell.costs['tokens_read']:.0f}",
            f"{cell.costs['seconds']:.2f}",
        )
        for cell in cells
    )
    return ReportTable(("method, data set", "searches", "tokens generated", "tokens read", "seconds"), rows)


def _published(summary: Summary) -> list[Section]:
    """Return the section with published rows, and those of this result beside them. [] without a data set in common."""
    sets = list(dict.fromkeys(cell.data_set for cell in summary.cells))
    published = rows_for(frozenset(sets))
    if not published:
        return []
    own = {(cell.method, cell.data_set): cell.metrics.get("em") for cell in summary.cells}
    methods = list(dict.fromkeys(cell.method for cell in summary.cells))
    rows = [(f"this result: {method}", *(_percent(own.get((method, name))) for name in sets)) for method in methods] + [
        (row.system, *(f"{row.values[n]:.1f}" if n in row.values else "-" for n in sets)) for row in published
    ]
    sources = dict.fromkeys(row.source for row in published)
    notes = ("EM in percent. Conditions differ from this result's: context, not a comparison.", *sources)
    return [Section("Published results", notes, ReportTable(("system", *sets), tuple(rows)))]


def _percent(value: Estimate | None) -> str:
    return "-" if value is None or math.isnan(value.mean) else f"{value.mean * 100:.1f}"


def _examples(rows: Sequence[Row]) -> list[Section]:
    found = []
    for failure in FAILURES:
        by_method: dict[str, list[Row]] = {}
        for row in rows:
            if row.get("failure") == failure and not is_failed(row):
                by_method.setdefault(row["method"], []).append(row)
        in_turn = [row for turn in zip_longest(*by_method.values()) for row in turn if row]
        if chosen := in_turn[: max(EXAMPLES, len(by_method))]:
            found.append(Section(f"Examples: {_words(failure)}", examples=tuple(map(_example, chosen))))
    return found


def _shown(segment: Mapping[str, Any]) -> str:
    """Return the text of a segment; of a search by a method what it found, because the next prompt has the passages."""
    if "titles" in segment:
        return f"search: {segment['query']}\nfound: {'; '.join(segment['titles']) or 'nothing'}"
    return str(segment.get("text", ""))


def _example(row: Row) -> Example:
    facts = (
        ("data set, question", f"{row['data_set']}, {row['question_id']}"),
        ("gold answers", " | ".join(row["answers"])),
        ("answer", row["answer"] or "(none)"),
        ("searches", str(row["searches"])),
    )
    parts, left = [], MOST_CHARS
    for segment in row.get("segments", ()):
        text = _shown(segment)[: max(0, left)]
        left -= len(text)
        kind = segment.get("owner")
        parts.append((kind if kind in ("policy", "environment") else "prompt", text))
    return Example(f"{row['method']}: {row['question']}", facts, tuple(parts))
