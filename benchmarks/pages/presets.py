"""Generate docs/presets.md: every preset value with that of its source, from `preset_sources.yaml`.

    python -m benchmarks.pages.presets > docs/presets.md

`tests/deploy/test_presets.py` compares each row with the loaded preset, and the page with what this prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.runtime.config import parse_yaml

TABLE = Path(__file__).with_name("preset_sources.yaml")
HEAD = """# Presets

<!-- made by `python -m benchmarks.pages.presets > docs/presets.md` -->

`foray init run.yaml --preset NAME` starts from a published recipe. This page lists every value with that of its source,
read at the commit named below; a test checks the presets against it. "(default)": the script does not set it, and the
default of its project applies.
"""


@dataclass(frozen=True)
class PresetValue:
    """One value of some presets: Foray's, the source's in the same unit, its location, and why they differ."""

    setting: str
    presets: tuple[str, ...]
    here: Any
    there: Any
    source: str
    why: str

    @property
    def equal(self) -> bool:
        """Return whether the preset has the value of its source."""
        return bool(self.here == self.there)


@dataclass(frozen=True)
class Behaviour:
    """A behaviour that no setting controls."""

    what: str
    presets: tuple[str, ...]
    there: str
    here: str
    equal: bool
    why: str


@dataclass(frozen=True)
class Table:
    """The file. `ours`: settings (or their prefixes) without a counterpart in a source; `inert`: settings that have no
    effect in a preset without a row for them."""

    sources: Mapping[str, str]
    rows: tuple[PresetValue, ...]
    behaviour: tuple[Behaviour, ...]
    ours: tuple[str, ...]
    inert: frozenset[str]

    def of(self, preset: str) -> list[PresetValue]:
        """Return the rows of one preset."""
        return [row for row in self.rows if preset in row.presets]


def read_table(path: Path = TABLE) -> Table:
    """Return the table in `path`. Raises KeyError for an unknown preset or group."""
    tree = parse_yaml(path.read_text(encoding="utf-8"))
    sources, groups = tree["sources"], tree["groups"]

    def names(given: Iterable[str]) -> Iterator[str]:
        for name in given:
            yield from [name] if name in sources else names(groups[name])

    rows = tuple(
        PresetValue(setting, tuple(names(c["presets"])), c["here"], c["there"], c["from"], c.get("why", ""))
        for setting, cases in tree["values"].items()
        for c in cases
    )
    behaviour = tuple(Behaviour(**{**item, "presets": tuple(names(item["presets"]))}) for item in tree["behaviour"])
    return Table(sources, rows, behaviour, tuple(tree["ours"]), frozenset(tree["inert"]))


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for every value in a tree of settings; a list is one value."""
    for name, value in tree.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from leaves(value, where)
        else:
            yield where, value


def page(table: Table) -> str:
    """Return the page as Markdown."""
    out = [HEAD, "| preset | source |", "|---|---|"]
    out += [f"| `{name}` | {source} |" for name, source in table.sources.items()]
    for title, equal in (("Values that differ", False), ("Equal values", True)):
        head = ("setting", "presets", *(("here", "source") if not equal else ("value",)), "from")
        head = head if equal else (*head, "why it differs")
        out += ["", f"## {title}", "", _line(head), "|---" * len(head) + "|"]
        for row in (row for row in table.rows if row.equal == equal):
            shown = (_value(row.here),) if equal else (_value(row.here), _value(row.there))
            cells = (f"`{row.setting}`", _names(table, row.presets), *shown, row.source)
            out.append(_line(cells if equal else (*cells, row.why)))
    ours = ", ".join(f"`{name}`" for name in table.ours)
    out += ["", f"Settings of Foray without a counterpart: {ours}.", ""]
    out += ["## Behaviour without a setting", "", "| what | presets | source | here | why |", "|---|---|---|---|---|"]
    for item in table.behaviour:
        why = item.why if item.equal else f"differs: {item.why}"
        out.append(_line((item.what, _names(table, item.presets), item.there, item.here, why)))
    return "\n".join(out) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _names(table: Table, presets: Sequence[str]) -> str:
    return "all" if set(presets) == set(table.sources) else ", ".join(presets)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(", ".join(f"{k} {v}" for k, v in item.items()) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(page(read_table()), end="")
