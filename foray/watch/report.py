"""The report of a run as a document: summary, problems, curves, validation, staleness, trajectories, configuration.

Made from the files of the run directory, and from Redis if it answers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.run.history import fields_of, read_steps, read_validations
from deploy.run.run_dir import Located, configuration_of, read_configuration
from deploy.run.snapshot import RunSnapshot, read_ledger_totals
from foray.versions import versions
from foray.watch.page import Chart, Example, Measured, Report, ReportTable, Section
from foray.watch.replay_view import Decoder, Shown, choose
from foray.watch.status import Problem, letters_line, problems, seq_balance, span, state, step_line, token_balance
from learner.checkpoint.journal import JournalEntry, read_journal
from learner.observability.reporting import token_lags
from protocol.redaction import redact

CURVES = (
    *("reward_mean", "reward/em", "response_length_mean", "searches_mean", "lag_mean", "zero_advantage_share"),
    *("loss", "entropy", "grad_norm", "kl_reference", "logprob_gap", "ess", "step_s", "tokens_generated_per_s"),
)
"""Fields of `metrics.jsonl` that are drawn, if the run has them."""
RECENT_GROUPS = 256
"""Trained groups for the histogram of lags."""
TRAJECTORIES = 6
MOST_CHARS = 20_000


def build_report(found: Located, snapshot: RunSnapshot, tokens: Decoder | None) -> Report:
    """Return the report of a run. tokens: decodes trajectories; None: they are left out."""
    directory = found.directory
    records = read_steps(directory / "metrics.jsonl")
    entries: Sequence[JournalEntry] = recent_groups(directory)
    wrong = problems(snapshot, max_lag=found.run.max_lag)
    sections = [
        *_problems(wrong),
        _accounting(snapshot),
        *_steps(records),
        *_curves(records),
        *_validations(directory),
        *_staleness(entries, found.run.max_lag),
        *(_trajectories(entries, tokens, found.run.max_lag) if tokens is not None else []),
        *_configuration(directory),
        Section("Environment of this report", examples=(Example("versions", tuple(_present(versions()))),)),
    ]
    return Report(f"Run {found.run.id}", tuple(sections), tuple(_facts(found, snapshot, records)))


def recent_groups(directory: Path) -> list[JournalEntry]:
    """Return the groups that were trained last, without those that a crash rolled back."""
    totals = read_ledger_totals(directory)
    lineage = totals.lineage if totals else ()
    journal = directory / "journal"
    return list(read_journal(journal, lineage=lineage, last=RECENT_GROUPS)) if journal.is_dir() else []


def _facts(found: Located, snapshot: RunSnapshot, records: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, str]]:
    facts = [("state", state(snapshot)), ("progress", step_line(snapshot)), ("model", str(found.run.model))]
    shape = f"{found.run.groups_per_step} groups of {found.run.group_size}, max_lag {found.run.max_lag}"
    facts.append(("batch", shape))
    if records:
        facts.append(("seconds of the steps", span(sum(float(r.get("step_s") or 0.0) for r in records.values()))))
    return [
        *facts,
        ("directory", str(found.directory)),
        ("written", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
    ]


def _problems(found: Sequence[Problem]) -> list[Section]:
    if not found:
        return []
    return [Section("Problems", tuple(redact(f"{p.what} -> {p.todo}") for p in found), warning=True)]


def _accounting(snapshot: RunSnapshot) -> Section:
    balance = token_balance(snapshot)
    lines = [f"seqs: {seq_balance(snapshot).line()}", *([f"tokens: {balance.line()}"] if balance else [])]
    return Section("Accounting", (*lines, f"dead letters: {letters_line(snapshot)}"))


def _steps(records: Mapping[int, Mapping[str, Any]]) -> list[Section]:
    """Return a table with first, last, smallest and largest value of each drawn field."""
    rows = []
    for name, curve in _found(records).items():
        values = list(curve.values())
        rows.append((name, *(f"{v:.4g}" for v in (values[0], values[-1], min(values), max(values)))))
    header = ("per step", "first", "last", "smallest", "largest")
    return [Section("Summary of the steps", table=ReportTable(header, tuple(rows)))] if rows else []


def _found(records: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    known = set(fields_of([dict(r) for r in records.values()]))
    return {
        name: {step: float(r[name]) for step, r in records.items() if isinstance(r.get(name), int | float)}
        for name in CURVES
        if name in known
    }


def _curves(records: Mapping[int, Mapping[str, Any]]) -> list[Section]:
    charts = tuple(Chart.of(name, curve) for name, curve in _found(records).items() if len(curve) > 1)
    return [Section("Curves", ("Values by step.",), charts=charts)] if charts else []


def _validations(directory: Path) -> list[Section]:
    curves = read_validations(directory)
    if not curves:
        return []
    shown = {name: curve for name, curve in curves.items() if name.rsplit("/", 1)[1] in ("em", "f1", "reward")}
    rows = tuple(
        (name.removeprefix("validation/"), str(max(curve)), f"{curve[max(curve)]:.3f}", f"{max(curve.values()):.3f}")
        for name, curve in shown.items()
    )
    charts = tuple(Chart.of(name, curve) for name, curve in shown.items() if len(curve) > 1)
    table = ReportTable(("suite, metric", "last step", "last", "largest"), rows)
    return [Section("Validation", table=table, charts=charts)]


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


def _trajectories(entries: Sequence[JournalEntry], tokens: Decoder, max_lag: int) -> list[Section]:
    chosen = choose(entries[-TRAJECTORIES:], max_lag=max_lag)
    examples = tuple(_example(shown, tokens) for shown in chosen)
    text = "The trajectory with the highest reward of each of the groups trained last."
    return [Section("Trajectories", (text,), examples=examples)] if examples else []


def _example(shown: Shown, tokens: Decoder) -> Example:
    group, one = shown.group, shown.trajectory
    facts = (
        ("seq, step", f"{group.seq}, {shown.step}"),
        ("gold answers", " | ".join(group.question.answers)),
        ("answer", one.answer or "(none)"),
        ("reward", f"{one.reward:g}; of the group: {' '.join(f'{t.reward:g}' for t in group.trajectories)}"),
        ("status", f"{one.status}, {one.turns} turns, {one.searches} searches, {one.num_sampled} sampled tokens"),
    )
    parts = tuple((str(s.owner), tokens.decode(s.ids.tolist())[:MOST_CHARS]) for s in one.segments)
    return Example(group.question.text, facts, parts)


def _configuration(directory: Path) -> list[Section]:
    path = configuration_of(directory)
    if path is None:
        return []
    values = tuple(flat(read_configuration(path, directory)))
    return [Section("Configuration", examples=(Example(path.name, values),))]


def flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Return (dotted name, redacted text) of each value of a tree of settings."""
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in flat(value[key], f"{path}.{key}" if path else str(key))]
    return [(path, "null" if value is None else redact(str(value)))]


def _present(found: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, text) for name, text in found.items() if text]
