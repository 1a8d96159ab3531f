"""The report of a run as a document: summary, problems, curves, validation, staleness, trajectories, configuration.

Made from the files of the run directory, and from Redis if it answers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploy.run.history import read_curves
from deploy.run.run_dir import Located, configuration_of, read_configuration
from deploy.run.snapshot import RunSnapshot
from foray.versions import versions
from foray.watch.facts import facts
from foray.watch.page import Chart, Example, Measured, Report, ReportTable, Section
from foray.watch.records import RECENT_GROUPS, leaves, read_lineage, trained_groups
from foray.watch.status import Problem, problems, span, state
from foray.watch.transcript import Decoder, Shown, choose, transcript
from learner.checkpoint.journal import JournalEntry
from learner.observability.reporting import token_lags
from protocol.redaction import redact

CURVES = (
    *("reward_mean", "reward/em", "response_length_mean", "searches_mean", "lag_mean", "zero_advantage_share"),
    *("loss", "entropy", "grad_norm", "kl_reference", "logprob_gap", "ess", "step_s", "tokens_generated_per_s"),
)
"""Fields of `metrics.jsonl` that are drawn, if the run has them."""
GROUPS = 3
"""Groups whose trajectories are shown."""
MOST_CHARS = 20_000
Curves = Mapping[str, Mapping[int, float]]


def build_report(found: Located, snapshot: RunSnapshot, tokens: Decoder | None) -> Report:
    """Return the report of a run. tokens: decodes trajectories; None: they are left out."""
    directory = found.directory
    curves = read_curves(directory)
    entries: Sequence[JournalEntry] = list(trained_groups(directory, last=RECENT_GROUPS))
    wrong = problems(snapshot, max_lag=found.run.max_lag)
    sections = [
        *_problems(wrong),
        *_steps(curves),
        *_validations(curves),
        *_staleness(entries, found.run.max_lag),
        *(_trajectories(entries, tokens, found) if tokens is not None else []),
        *_configuration(directory),
        Section("Environment of this report", examples=(Example("versions", tuple(_present(versions()))),)),
    ]
    return Report(f"Run {found.run.id}", tuple(sections), tuple(_facts(found, snapshot, curves)))


def _facts(found: Located, snapshot: RunSnapshot, curves: Curves) -> Iterator[tuple[str, str]]:
    yield "state", state(snapshot)
    yield from facts(snapshot, max_lag=found.run.max_lag).items()
    yield "model", str(found.run.model)
    shape = f"{found.run.groups_per_step} groups of {found.run.group_size}, max_lag {found.run.max_lag}"
    yield "batch", shape
    if seconds := curves.get("step_s"):
        yield "seconds of the steps", span(sum(seconds.values()))
    yield "directory", str(found.directory)
    yield "written", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def _problems(found: Sequence[Problem]) -> list[Section]:
    if not found:
        return []
    return [Section("Problems", tuple(redact(f"{p.what} -> {p.todo}") for p in found), warning=True)]


def _steps(curves: Curves) -> list[Section]:
    """Return a table with first, last, smallest and largest value of each drawn field, and the curves."""
    shown = {name: curves[name] for name in CURVES if name in curves}
    if not shown:
        return []
    rows = []
    for name, curve in shown.items():
        values = list(curve.values())
        rows.append((name, *(f"{v:.4g}" for v in (values[0], values[-1], min(values), max(values)))))
    header = ("per step", "first", "last", "smallest", "largest")
    return [Section("Summary of the steps", table=ReportTable(header, tuple(rows))), *_drawn("Curves", shown)]


def _drawn(title: str, curves: Curves) -> list[Section]:
    charts = tuple(Chart.of(name, curve) for name, curve in curves.items() if len(curve) > 1)
    return [Section(title, ("Values by step.",), charts=charts)] if charts else []


def _validations(curves: Curves) -> list[Section]:
    validated = {name: curve for name, curve in curves.items() if name.startswith("validation/")}
    shown = {name: curve for name, curve in validated.items() if name.rsplit("/", 1)[1] in ("em", "f1", "reward")}
    if not validated:
        return []
    rows = tuple(
        (name.removeprefix("validation/"), str(max(curve)), f"{curve[max(curve)]:.3f}", f"{max(curve.values()):.3f}")
        for name, curve in shown.items()
    )
    table = ReportTable(("suite, metric", "last step", "last", "largest"), rows)
    return [Section("Validation", table=table), *_drawn("Curves of the validations", shown)]


def _staleness(entries: Sequence[JournalEntry], max_lag: int) -> list[Section]:
    """Return the lags of the tokens in the recent groups: a group of step n was trained by the policy of step n - 1."""
    lags: Counter[int] = Counter()
    for entry in entries:
        lags.update(token_lags([entry.group], entry.step - 1))
    total = sum(lags.values())
    if not total:
        return []
    rows = tuple(
        (str(steps), f"{count:,}", Measured(f"{count / total:.1%}", count / total, 0.0, count / total))
        for steps, count in sorted(lags.items())
    )
    text = f"Sampled tokens of the last {len(entries)} trained groups, by steps between sampling and training."
    bound = f"Tokens with a lag above {max_lag} (run.max_lag) have no gradient."
    return [Section("Staleness", (text, bound), ReportTable(("lag in steps", "tokens", "share"), rows))]


def _trajectories(entries: Sequence[JournalEntry], tokens: Decoder, found: Located) -> list[Section]:
    lineage = read_lineage(found.directory)
    chosen = choose(entries[-GROUPS:], every=True, max_lag=found.run.max_lag, lineage=lineage)
    examples = tuple(_example(shown, tokens) for shown in chosen)
    text = f"All trajectories of the {GROUPS} groups trained last."
    return [Section("Trajectories", (text,), examples=examples)] if examples else []


def _example(shown: Shown, tokens: Decoder) -> Example:
    parts: list[tuple[str, str]] = []
    for part in transcript(shown, tokens):
        parts += [("label", f"{part.label()}\n"), (str(part.segment.owner), part.text[:MOST_CHARS].strip("\n") + "\n")]
    title = f"reward {shown.trajectory.reward:g}: {shown.group.question.text}"
    return Example(title, (("seq, step", f"{shown.group.seq}, {shown.step}"), *shown.facts()), tuple(parts))


def _configuration(directory: Path) -> list[Section]:
    path = configuration_of(directory)
    if path is None:
        return []
    tree = read_configuration(path, directory)
    values = tuple((name, "null" if value is None else redact(str(value))) for name, value in leaves(tree))
    return [Section("Configuration", examples=(Example(path.name, values),))]


def _present(found: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, text) for name, text in found.items() if text]
