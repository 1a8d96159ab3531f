"""Generate `docs/benchmarks.md` and `docs/benchmarks-raw.md` from their templates and the files in `docs/figures`. Pure
except for reading them.

A line `{{NAME}}` in a template becomes the figure of that name: how and when it was made, its ratio to the baseline,
targets, and its tables. `{{summary}}`, `{{demo}}` and `{{compare}}` are tables of many figures. `{{NAME.FIELD}}`
becomes one number of a figure, or its range over seeds; `{{recipe.FIELD}}` a cell about the demos of docs/recipes.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo_lm import recipes
from benchmarks.figures.table import FOLDER, figures, read
from benchmarks.figures.table import stale as is_stale
from benchmarks.report import ROOT

PAGES = {ROOT / "docs" / f"{name}.md": FOLDER / f"{name}.template" for name in ("benchmarks", "benchmarks-raw")}
"""The page of results and that of raw figures -> their templates."""
STALE = "## Stale figures\n\nThe code that these measure has changed since:"
MET = {True: "**met**", False: "**missed**", None: "not measured"}
FACTS = ("figure", "command", "name", "value", "unit", "baseline", "ratio", "settings")
ENVELOPE = frozenset({*FACTS, "machine", "modules", "targets", "absent"})
"""Parts of a report that are not tables."""
DEMO = ("em_before", "em_after", "em_greedy_before", "em_greedy_after", "em_after_without_search", "searches_before",
        "searches_after", "lag_mean", "lag_max", "seconds")  # fmt: skip
HARD = ("gate_query", "gate_evidence", "em_before", "em_after", "em_1hop_before", "em_1hop_after", "em_2hop_before",
        "em_2hop_after", "em_3hop_before", "em_3hop_after", "searches_before", "searches_after", "half_gain", "steps",
        "seconds")  # fmt: skip
COMPARE = ("reached", "em_last", "em_best", "held_out_before", "held_out_after", "held_out_greedy", "without_search",
           "seconds")  # fmt: skip
STEP = ("reached", "half_gain")
"""A step, or None if it was not reached."""
_PLACE = re.compile(r"^\{\{([a-z0-9_-]+)\}\}$", re.M)
_FIELD = re.compile(r"\{\{([a-z0-9_-]+)\.(\w+)\}\}")


TENTH = 10
"""Steps per row of the curves."""
Kept = Mapping[str, Any]


def page(template: Path, folder: Path = FOLDER) -> str:
    """Return the page. Raises KeyError for a placeholder without a figure, ValueError for a figure without one."""
    return _Page(folder).text(template)


class _Page:
    """The files, read once, and the hashes of the code that they measure."""

    def __init__(self, folder: Path) -> None:
        self.known = figures()
        self.kept = {name: read(figure, folder) for name, figure in self.known.items()}
        hashes: dict[tuple[str, ...], str] = {}
        self.stale = {
            name: found is not None and is_stale(self.known[name], found, hashes) for name, found in self.kept.items()
        }

    def text(self, template: Path) -> str:
        whole: dict[str, Callable[[], str]] = {
            "summary": self.summary,
            "demo": lambda: self.many("demo", DEMO),
            "demo-curves": lambda: self.curves("demo", TENTH),
            "demo-agent": lambda: self.many("demo-agent", DEMO),
            "demo-agent-curves": lambda: self.curves("demo-agent", TENTH),
            "demo-hard": lambda: self.many("demo-hard", HARD),
            "demo-hard-curves": lambda: self.curves("demo-hard", 2 * TENTH),
            "compare": lambda: self.many("compare", COMPARE),
        }
        seen: set[str] = set()

        def fill(match: re.Match[str]) -> str:
            name = match[1]
            seen.add(name)
            return whole[name]() if name in whole else self.block(name)

        text = _FIELD.sub(lambda match: self.field(*match.groups()), _PLACE.sub(fill, template.read_text()))
        if seen and (lost := {name for name in self.known if name.partition("-")[0] not in whole} - seen):
            raise ValueError(f"{template.name} has no place for {', '.join(sorted(lost))}")
        if seen and (old := [name for name, changed in self.stale.items() if changed]):
            text = f"{text.rstrip()}\n\n{STALE} {', '.join(old)}.\n"
        first, rest = text.split("\n", 1)
        return f"{first}\n\n<!-- made by `make figures` from docs/figures: change that, not this -->\n{rest}"

    def field(self, name: str, field: str) -> str:
        """Return one number of a figure or its range over seeds, what became of its targets, or when it was made."""
        if name == "recipe":
            return recipes.headline()[field]
        kept = self.kept.get(name)
        if kept is None:
            seeds = [one[field] for seed, one in self.measured_of(name).items() if not seed.endswith("control")]
            return f"{min(seeds):.2f} to {max(seeds):.2f}" if seeds else MET[None]
        if field == "measured":
            return measured(kept)
        if field == "target":
            return "; ".join(f"at least {shown(t['at_least'])}: {MET[t['met']]}" for t in kept["targets"])
        return shown(kept[field]) if field in kept else MET[None]

    def summary(self) -> str:
        """Return a row per benchmark: figure, ratio, targets, and date."""
        rows = []
        for name, kept in self.kept.items():
            if name.partition("-")[0] in ("demo", "compare"):
                continue
            if kept is None:
                rows.append([name, "not measured yet", "", "", ""])
                continue
            value = f"{shown(kept['value'])} {kept['unit']}"
            against = f"{shown(kept['ratio'])} x {kept['baseline']['name']}"
            rows.append([name, value, against, "; ".join(map(verdict, kept["targets"])), measured(kept)])
        return grid(["", "figure", "against its baseline", "target", "measured"], rows)

    def block(self, name: str) -> str:
        """Return the section about one benchmark's figure."""
        kept = self.kept[name]
        lines = [f"    {kept['command'] if kept else self.known[name].command}", ""]
        if kept is None:
            return "\n".join([*lines, f'Not measured yet: `make figures ARGS="{name}"`.'])
        machine = kept["machine"]
        load = f"load {shown(machine['load_1m'])} before and {shown(machine['load_1m_end'])} after"
        at = f"Measured {machine['date']} at {machine['commit']} on {machine['cores']} cores ({machine['cpu']}), {load}"
        lines += [f"{at}.", ""]
        ratio = f"{shown(kept['ratio'])} times that of: {kept['baseline']['name']}."
        lines += [f"**{shown(kept['value'])} {kept['unit']}**, {ratio}"]
        lines += [*(f"Target: {verdict(target)}." for target in kept["targets"]), ""]
        lines += [f"Left out: {which}, {why}." for which, why in (kept.get("absent") or {}).items()]
        return "\n".join([*lines, *tables(kept)]).rstrip()

    def many(self, start: str, columns: Sequence[str]) -> str:
        """Return a row for each measured figure whose name is `start` and one more part."""
        rows = []
        for name, kept in self.measured_of(start).items():
            short = name.removeprefix(f"{start}-")
            cells = ["never" if c in STEP and kept.get(c) is None else shown(kept.get(c)) for c in columns]
            rows.append([short, *cells, ", ".join(MET[t["met"]] for t in kept["targets"]), measured(kept)])
        return grid(["", *(c.replace("_", " ") for c in columns), "target", "measured"], rows)

    def measured_of(self, start: str) -> dict[str, Kept]:
        """Return the measured figures whose name is `start` and one more part."""
        return {name: kept for name, kept in self.kept.items() if kept and name.rpartition("-")[0] == start}

    def curves(self, start: str, steps: int) -> str:
        """Return the learning curves of demos, as means of `steps` steps."""
        found = {
            name.removeprefix(f"{start}-"): kept["curve"]
            for name, kept in self.measured_of(start).items()
            if "curve" in kept
        }
        if not found:
            return "Not measured yet."
        starts = range(0, max(map(len, found.values())), steps)
        rows = [
            [f"{at + 1}-{at + steps}", *(_mean(curve[at : at + steps]) for curve in found.values())] for at in starts
        ]
        return grid(["steps", *found], rows)


def measured(kept: Kept) -> str:
    """Return `2026-11-22 at 1ba19b5`."""
    return f"{kept['machine']['date']} at {kept['machine']['commit']}"


def _mean(part: Sequence[float]) -> str:
    return f"{sum(part) / len(part):.2f}" if part else ""


def verdict(target: Mapping[str, Any]) -> str:
    """Return for example `0.52 of 0.6: **missed**`."""
    value = "" if target["met"] is None else f"{shown(target['value'])}, "
    return f"{target['what']}, at least {target['at_least']:g}: {value}{MET[target['met']]}"


def tables(report: Mapping[str, Any]) -> list[str]:
    """Return the details of a report: lists of records, similar dictionaries side by side, and the rest."""
    lines: list[str] = []
    alike: list[dict[str, Mapping[str, Any]]] = []
    left: dict[str, Any] = {}
    details = {name: value for name, value in report.items() if name not in ENVELOPE}
    for name, value in details.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            columns = list(dict.fromkeys(c for row in value for c in row if not _nested(row[c])))
            lines += ["", f"`{name}`:", "", grid(columns, [[shown(row.get(c)) for c in columns] for row in value])]
        elif isinstance(value, Mapping):
            _join(alike, name, value)
        else:
            left[name] = value
    baseline = dict(report["baseline"])
    _join(alike, str(baseline.pop("name")), baseline)
    alone: dict[str, Mapping[str, Any]] = {}
    for group in alike:
        columns = list(dict.fromkeys(c for row in group.values() for c in row))
        if len(group) == 1:
            alone |= group
        else:
            cells = [[name, *(shown(row.get(c)) for c in columns)] for name, row in group.items()]
            lines += ["", grid(["", *columns], cells)]
    for name, figures_of in (alone | {"others": left}).items():
        if figures_of:
            lines += [
                "",
                f"{name}: " + "; ".join(f"{which} {shown(value)}" for which, value in figures_of.items()) + ".",
            ]
    return lines[1:]


def _join(alike: list[dict[str, Mapping[str, Any]]], name: str, value: Mapping[str, Any]) -> None:
    """Put it next to dictionaries that share at least half of its names. Nested names are joined with a dot."""
    value = dict(_flat(value))
    for group in alike:
        common = set(value) & set(next(iter(group.values())))
        if 2 * len(common) >= len(value):
            group[name] = value
            return
    alike.append({name: value})


def _flat(value: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{start}{name}.")
        elif not isinstance(item, list):
            yield f"{start}{name}", item


def _nested(value: object) -> bool:
    return isinstance(value, Mapping | list)


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def shown(value: object) -> str:
    """Format a figure: at most four digits, with thousands separators."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case list():
            return ", ".join(shown(item) for item in value)
        case _:
            return str(value)
