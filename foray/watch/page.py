"""Static reports: a document of tables and texts, rendered for a terminal, as Markdown and as one HTML file.

The HTML has no scripts and loads nothing: it can be mailed and opened anywhere. Every text is escaped, because texts
come from models, passages and file names. Template: `templates/page.html`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploy.terminal import aligned
from foray.watch.transcript import visible
from protocol.errors import UserError

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Measured:
    """A number with its interval, all in [0, 1]: HTML draws it as a bar. `text` is what every form prints."""

    text: str
    mean: float
    low: float
    high: float


CellText = str | Measured


@dataclass(frozen=True)
class ReportTable:
    """A table. The first column is text, the others are aligned right."""

    header: tuple[str, ...]
    rows: tuple[tuple[CellText, ...], ...]


@dataclass(frozen=True)
class Example:
    """A text that HTML folds away under its title; the terminal leaves it out."""

    title: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, str], ...] = ()
    """(kind, text) of the parts of a transcript; the kind chooses the colour: policy, environment or prompt."""


CHART_WIDTH, CHART_HEIGHT = 360, 110
MOST_POINTS = 360


@dataclass(frozen=True)
class Chart:
    """A curve, which HTML draws. `points`: of an SVG polyline. The other fields are labels of the axes."""

    title: str
    points: str
    low: str
    high: str
    first: str
    last: str

    @classmethod
    def of(cls, title: str, curve: Mapping[int, float]) -> Chart:
        """Return the chart of step -> value; of a long curve, means of neighbouring steps."""
        steps = sorted(curve)
        size = -(-len(steps) // MOST_POINTS)
        parts = [steps[at : at + size] for at in range(0, len(steps), size)]
        values = {part[-1]: sum(curve[step] for step in part) / len(part) for part in parts}
        low, high = min(values.values()), max(values.values())
        across, up = (max(values) - min(values)) or 1, (high - low) or 1.0
        points = (
            f"{(step - min(values)) / across * CHART_WIDTH:.1f},{(high - value) / up * CHART_HEIGHT:.1f}"
            for step, value in values.items()
        )
        least = f"{low:.4g}" if low < high else ""  # a flat curve has one value
        return cls(title, " ".join(points), least, f"{high:.4g}", str(steps[0]), str(steps[-1]))


@dataclass(frozen=True)
class Section:
    """A part of a document."""

    title: str
    paragraphs: tuple[str, ...] = ()
    table: ReportTable | None = None
    examples: tuple[Example, ...] = ()
    warning: bool = False
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True)
class Report:
    """A report. `facts`: (name, value) below the title."""

    title: str
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...] = field(default=())


def without(document: Report, title: str) -> Report:
    """Return the document without the section `title`."""
    return replace(document, sections=tuple(section for section in document.sections if section.title != title))


def to_html(document: Report) -> str:
    """Return one HTML page without scripts or references. Raises UserError without jinja2."""
    return render_template("page.html", document=document)


def render_template(name: str, **values: Any) -> str:
    """Return `templates/NAME` with `values`, all texts escaped. Raises UserError without jinja2."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise UserError("HTML pages need jinja2", todo="pip install 'foray[rollout]'") from None

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["measured"] = lambda cell: isinstance(cell, Measured)
    environment.filters["visible"] = lambda text: visible(str(text), newline=True)
    return environment.get_template(name).render(**values) + "\n"


def to_markdown(document: Report) -> str:
    """Return the document as GitHub's Markdown, without its examples."""
    lines = [f"# {_inline(document.title)}", ""]
    lines += [f"- {_inline(name)}: {_inline(value)}" for name, value in document.facts]
    for section in document.sections:
        if section.examples and not (section.table or section.paragraphs):
            continue
        lines += ["", f"## {_inline(section.title)}", ""]
        lines += [paragraph for text in section.paragraphs for paragraph in (_inline(text), "")]
        if section.table is not None:
            lines += _markdown_table(section.table)
    return "\n".join(lines).rstrip() + "\n"


def to_text(document: Report) -> str:
    """Return the document for a terminal: aligned columns, control characters replaced, without its examples."""
    lines = [visible(document.title)]
    for section in document.sections:
        if section.examples and not (section.table or section.paragraphs):
            continue
        lines += ["", visible(section.title), *(f"  {visible(text)}" for text in section.paragraphs)]
        if section.table is not None:
            rows = (tuple(visible(text_of(cell)) for cell in row) for row in section.table.rows)
            lines += [f"  {line}" for line in aligned(section.table.header, rows, numbers_from=1)]
    return "\n".join(lines)


def _markdown_table(table: ReportTable) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = ["---", *(["---:"] * (len(table.header) - 1))]
    rows = (line([_inline(text_of(cell)) for cell in row]) for row in table.rows)
    return [line([_inline(name) for name in table.header]), line(rule), *rows]


def text_of(cell: CellText) -> str:
    """Return the printed form of a cell."""
    return cell.text if isinstance(cell, Measured) else cell


def _inline(text: str) -> str:
    """Return the text on one line, with the characters that Markdown or HTML would interpret escaped."""
    escaped = visible(text)
    for character in "\\`*_[]|<":
        escaped = escaped.replace(character, f"\\{character}" if character != "<" else "&lt;")
    return escaped
