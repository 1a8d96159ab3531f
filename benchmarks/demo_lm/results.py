"""The demo's results: a row for each policy, paired differences, the curve, and trajectories of the same question."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.demo_lm.phases import read_phases
from foray.data.coverage import kind_of
from foray.evaluation.statistics import Estimate, interval, paired_test
from foray.evaluation.store import Row, is_result, read_rows
from foray.evaluation.summary import is_valid
from learner.data.questions import load_questions
from learner.validation.results import ValidationFiles
from rollout_server.rewards.base import TurnText
from rollout_server.rewards.format import well_formed

CONTROL = "GRPO, rewards shuffled"
POLICIES = (
    ("untrained", "untrained", "policy"),
    ("naive RAG", "untrained", "rag"),
    ("warm start", "warm", "policy"),
    ("GRPO", "grpo", "policy"),
    (CONTROL, "grpo-control", "policy"),
)
"""Row of the table -> (result in `eval/`, method)."""
COLUMNS = {
    "em": "EM",
    "f1": "F1",
    "searched": "searched",
    "searches": "searches",
    "well_formed": "well-formed",
    "evidence": "evidence",
    "tokens": "tokens",
}
PAIRED = ("em", "f1", "searches", "evidence")
"""Columns of which a result keeps each question's value, so that demos of several machines are compared as one."""
DIFFERENCES = (("warm start", "GRPO"), ("naive RAG", "GRPO"), (CONTROL, "GRPO"))
EXAMPLES = 3
Kinds = dict[str, dict[str, str]]


@dataclass(frozen=True)
class PolicyResult:
    """Episodes of one policy. `values`: column -> data set -> question -> one value per episode."""

    name: str
    rows: tuple[Row, ...]
    values: dict[str, dict[str, dict[str, list[float]]]]

    def by_question(self, column: str, data_set: str) -> dict[str, float]:
        """Return question -> mean over its episodes."""
        return {question: sum(v) / len(v) for question, v in self.values[column].get(data_set, {}).items()}

    def mean(self, column: str, data_set: str) -> Estimate:
        """Return the mean over the questions of a data set, with its interval."""
        return interval({data_set: list(self.by_question(column, data_set).values())})


def is_well_formed(row: Row) -> bool:
    """Return whether the policy's turns follow the protocol, as the format reward defines it."""
    turns = [str(s["text"]) for s in row["segments"] if s.get("owner") == "policy"]
    return well_formed(tuple(TurnText(text) for text in turns))


def read_policies(directory: Path) -> list[PolicyResult]:
    """Return the policies that were evaluated so far, in the order of the table."""
    found = []
    for name, result, method in POLICIES:
        if rows := read_episodes(directory / "eval" / result, method):
            found.append(policy_result(name, rows))
    return found


def read_episodes(where: Path, method: str = "policy") -> tuple[Row, ...]:
    """Return the valid episodes of a method in a result of `foray eval`, () if there is none."""
    rows = read_rows(where) if is_result(where) else ()
    return tuple(row for row in rows if row["method"] == method and is_valid(row))


def policy_result(name: str, rows: Iterable[Row]) -> PolicyResult:
    """Return the episodes of one policy; those of several seeds are averaged by question."""
    rows = tuple(rows)
    return PolicyResult(name, rows, _values(rows))


def _values(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, list[float]]]]:
    values: dict[str, dict[str, dict[str, list[float]]]] = {column: {} for column in COLUMNS}
    for row in rows:
        measured = {
            "em": row["metrics"]["em"],
            "f1": row["metrics"]["f1"],
            "searched": row["searches"] > 0,
            "searches": row["searches"],
            "well_formed": is_well_formed(row) if row["method"] == "policy" else None,
            "evidence": row["evidence"],
            "tokens": row["tokens_generated"] + row["tokens_read"],
        }
        for column, value in measured.items():
            if value is not None:
                of_set = values[column].setdefault(row["data_set"], {})
                of_set.setdefault(row["question_id"], []).append(float(value))
    return values


def differences(policies: Sequence[PolicyResult]) -> list[dict[str, Any]]:
    """Return the paired tests of EM and F1 between policies, per data set."""
    by_name = {policy.name: policy for policy in policies}
    found = []
    for first, second in DIFFERENCES:
        if first not in by_name or second not in by_name:
            continue
        for metric in ("em", "f1"):
            for data_set in by_name[second].values[metric]:
                left, right = (by_name[name].by_question(metric, data_set) for name in (first, second))
                common = sorted(left.keys() & right.keys())
                test = paired_test({data_set: [left[q] for q in common]}, {data_set: [right[q] for q in common]})
                row = {"from": first, "to": second, "metric": metric, "data_set": data_set}
                found.append(row | {key: round(value, 4) for key, value in vars(test).items()})
    return found


def kinds_of(directory: Path, policies: Sequence[PolicyResult]) -> Kinds:
    """Return data set -> question -> source and hops, for the data sets that are evaluated and in `questions/`."""
    paths = {name: directory / "questions" / f"{name}.jsonl" for policy in policies for name in policy.values["f1"]}
    asked = {name: load_questions(path).questions for name, path in paths.items() if path.is_file()}
    return {name: {question.id: kind_of(question) for question in found} for name, found in asked.items()}


def by_question(policies: Sequence[PolicyResult], kinds: Kinds) -> dict[str, dict[str, Any]]:
    """Return each data set's questions, their kinds, and their values by policy and column: None if not measured."""
    found = {}
    for name in dict.fromkeys(name for policy in policies for name in policy.values["f1"]):
        ids = sorted({question for policy in policies for question in policy.values["f1"].get(name, {})})
        values: dict[str, dict[str, list[float | None]]] = {}
        for policy in policies:
            of_policy = values[policy.name] = {}
            for column in PAIRED:
                if means := policy.by_question(column, name):
                    of_policy[column] = [round(means[q], 4) if q in means else None for q in ids]
        found[name] = {"ids": ids, "kinds": [kinds.get(name, {}).get(q) for q in ids], "values": values}
    return found


def of_questions(results: Iterable[Mapping[str, Any]]) -> tuple[list[PolicyResult], Kinds]:
    """Return the policies of several results as one, from `by_question`, and the kinds of their questions."""
    merged: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}
    kinds: Kinds = {}
    for result in results:
        for name, kept in result["by_question"].items():
            kinds.setdefault(name, {}).update(
                (q, kind) for q, kind in zip(kept["ids"], kept["kinds"], strict=True) if kind
            )
            for policy, columns in kept["values"].items():
                of_policy = merged.setdefault(policy, {column: {} for column in COLUMNS})
                for column, values in columns.items():
                    of_set = of_policy[column].setdefault(name, {})
                    for q, value in zip(kept["ids"], values, strict=True):
                        if value is not None:
                            of_set.setdefault(q, []).append(value)
    return [PolicyResult(name, (), merged[name]) for name, *_ in POLICIES if name in merged], kinds


def by_kind(policies: Sequence[PolicyResult], asked: Kinds) -> list[dict[str, Any]]:
    """Return F1 and searches by data set, source and hops, before (warm start) and after (GRPO), with paired tests.

    Each data set also has a row for all its questions.
    """
    named = {policy.name: policy for policy in policies}
    if not {"warm start", "GRPO"} <= named.keys():
        return []
    before, after, found = named["warm start"], named["GRPO"], []
    for data_set in after.values["f1"]:
        kinds = asked.get(data_set, {})
        for metric in ("f1", "searches"):
            left, right = (policy.by_question(metric, data_set) for policy in (before, after))
            common = sorted(left.keys() & right.keys())
            for kind in ("all", *sorted({kinds[q] for q in common if q in kinds})):
                chosen = [q for q in common if kind in ("all", kinds.get(q))]
                pair = [left[q] for q in chosen], [right[q] for q in chosen]
                test = paired_test({kind: pair[0]}, {kind: pair[1]})
                means = {"before": fmean(pair[0]), "after": fmean(pair[1]), **vars(test)} if chosen else {}
                row = {"data_set": data_set, "kind": kind, "metric": metric}
                found.append(row | {key: round(value, 4) for key, value in means.items()})
    return found


def curve(run_dir: Path) -> list[dict[str, float]]:
    """Return the validations of a run: step, EM and F1 on the validation questions."""
    return [
        {"step": record["step"], **{metric: round(means[metric], 4) for metric in ("em", "f1") if metric in means}}
        for record in ValidationFiles(run_dir).records()
        for means in record["suites"].values()
    ]


def examples(policies: Sequence[PolicyResult]) -> list[dict[str, Any]]:
    """Return trajectories of the same questions before and after training, those with the largest gain in F1."""
    by_name = {policy.name: policy for policy in policies}
    if "warm start" not in by_name or "GRPO" not in by_name:
        return []
    shown = ("untrained", "warm start", "GRPO")
    rows = {
        name: {(r["data_set"], r["question_id"]): r for r in by_name[name].rows} for name in shown if name in by_name
    }
    common = sorted(set.intersection(*(set(found) for found in rows.values())))
    gain = {key: rows["GRPO"][key]["metrics"]["f1"] - rows["warm start"][key]["metrics"]["f1"] for key in common}
    chosen = sorted(common, key=lambda key: -gain[key])[:EXAMPLES]
    return [
        {
            "question": rows["GRPO"][key]["question"],
            "answers": rows["GRPO"][key]["answers"],
            "f1": {name: found[key]["metrics"]["f1"] for name, found in rows.items()},
            "text": {name: "".join(str(s["text"]) for s in found[key]["segments"][1:]) for name, found in rows.items()},
        }
        for key in chosen
    ]


def summary(directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `result.json`."""
    policies, phases = read_policies(directory), read_phases(directory)
    kinds = kinds_of(directory, policies)
    return {
        **facts,
        "hours": round(sum(used["seconds"] for used in phases.values()) / 3600, 2),
        "cpu_hours": round(sum(used["cpu_seconds"] for used in phases.values()) / 3600, 2),
        "phases": phases,
        "policies": {
            policy.name: {
                data_set: {column: _plain(policy.mean(column, data_set)) for column in COLUMNS}
                for data_set in policy.values["em"]
            }
            for policy in policies
        },
        "differences": differences(policies),
        "kinds": by_kind(policies, kinds),
        "by_question": by_question(policies, kinds),
        "curve": curve(directory / "grpo"),
        "control_curve": curve(directory / "grpo-control"),
        "examples": examples(policies),
    }


def _plain(value: Estimate) -> dict[str, float] | None:
    return None if not value.n else {key: round(number, 4) for key, number in vars(value).items()}


def results_text(result: Mapping[str, Any]) -> str:
    """Return the results as text."""
    lines = []
    for data_set in next(iter(result["policies"].values()), {}):
        every = [sets.get(data_set, {}) for sets in result["policies"].values()]
        columns = {name: title for name, title in COLUMNS.items() if any(name in found for found in every)}
        lines += [f"\n{data_set}", f"{'':24}" + "".join(f"{title:>18}" for title in columns.values())]
        for name, sets in result["policies"].items():
            cells = [_cell(column, sets.get(data_set, {}).get(column)) for column in columns]
            lines.append(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))
    lines += ["", "paired differences, 95 % intervals"]
    for row in result["differences"]:
        change = f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}] p {row['p_value']:.4f}"
        lines.append(f"  {row['data_set']:9} {row['metric']:3} {row['from']} -> {row['to']}: {change}")
    lines += rows_of_kinds(result.get("kinds", []))
    for title, points in (("validation", result["curve"]), ("control", result["control_curve"])):
        if points:
            shown = "  ".join(f"{point['step']:g}: {point['f1']:.3f}" for point in points)
            lines.append(f"{title}, F1 by step: {shown}")
    for example in result["examples"]:
        lines.append(f"\n{example['question']} ({' | '.join(example['answers'])})")
        lines += [f"  {name}: {' '.join(text.split())}" for name, text in example["text"].items()]
    lines.append("")
    for name, used in result["phases"].items():
        lines.append(f"{name:24}{used['seconds'] / 60:8.1f} min{used['cpu_seconds'] / 60:8.1f} CPU min")
    if "sizes" in result:
        lines.append(f"expected: {result['sizes']['expected']}")
    lines.append(f"{'all':24}{result['hours'] * 60:8.1f} min{result['cpu_hours'] * 60:8.1f} CPU min")
    return "\n".join(lines)


def rows_of_kinds(kinds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of `by_kind`."""
    lines = ["", "by source and hops, warm start -> GRPO: paired differences, 95 % intervals"] if kinds else []
    for row in kinds:
        change = f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
        where = f"  {row['data_set']:10} {row['metric']:9} {row['kind']:14}{row['n']:5}"
        lines.append(f"{where}  {row['before']:.3f} -> {row['after']:.3f}: {change}")
    return lines


def _cell(column: str, value: Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    if column == "tokens":
        return f"{value['mean']:.0f}"
    if column in ("em", "f1"):
        return f"{value['mean']:.3f} [{value['low']:.2f},{value['high']:.2f}]"
    return f"{value['mean']:.2f}"


def write(directory: Path, result: Mapping[str, Any]) -> Path:
    """Write `result.json` and return its path."""
    path = directory / "result.json"
    path.write_text(json.dumps(result) + "\n")
    return path
