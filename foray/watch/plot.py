"""Plot curves. The same values give the same bytes, so that plots in the repository change only with their data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import UserError
from protocol.runtime.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")
RC: Any = {
    # makes the names of clip paths and markers deterministic
    "svg.hashsalt": "foray",
    # keep text as text: smaller, searchable, and independent of this machine's fonts
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
}
PANELS = 4
"""Panels side by side."""
STYLES = ("-", "--", ":", "-.")
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f")


def plot_curves(
    path: Path,
    curves: Mapping[str, Mapping[int, float]],
    *,
    metric: str,
    every: int,
    baselines: Mapping[str, float],
) -> None:
    """Write an SVG or PNG of {label: {step: value}}, with a horizontal line for each of `baselines`.

    Raises UserError if matplotlib is not installed, or for another file type.
    """
    with _figure(path, (8.0, 4.5)) as figure:
        axes = figure.add_subplot()
        _draw(axes, curves, baselines)
        axes.set_xlabel("step")
        axes.set_ylabel(metric if every == 1 else f"{metric}, mean of {every} steps")


def plot_panels(
    path: Path, panels: Mapping[str, tuple[Mapping[int, float], Mapping[str, int]]], *, metric: str
) -> None:
    """Write an SVG or PNG with a panel for each {title: (step -> value, name of an event -> its step)}, events on top.

    Raises UserError if matplotlib is not installed, or for another file type.
    """
    columns = min(PANELS, len(panels))
    rows = -(-len(panels) // columns)
    with _figure(path, (4.2 * columns, 2.8 * rows)) as figure:
        for number, (title, (curve, events)) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, columns, number)
            axes.plot(list(curve), list(curve.values()), color=COLOURS[0], linewidth=1.2)
            axes.set_title(title, fontsize="small", loc="left")
            axes.set_ylim(0, 2)
            axes.set_yticks([0, 0.5, 1])
            for height, (event, step) in enumerate(sorted(events.items(), key=lambda item: item[1])):
                axes.plot([step, step], [0, 1.9 - 0.1 * height], color=COLOURS[3], linewidth=0.4)
                axes.annotate(f"{event} {step}", (step, 1.9 - 0.1 * height), fontsize=6, va="center")
            axes.grid(visible=True, linewidth=0.4, alpha=0.6)
        figure.supxlabel(f"step; {metric}", fontsize="small")


@contextmanager
def _figure(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    if path.suffix not in FORMATS:
        raise UserError(
            f"cannot plot to {path}", why="the suffix selects the format", todo="use the suffix .svg or .png"
        )
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        todo = "pip install matplotlib, or pip install 'foray[plots]'"
        raise UserError("plots need matplotlib", why=str(error), todo=todo) from error
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=inches, layout="constrained")
        yield figure
        # no date and no version, which would change between runs
        plain, image = ({"Date": None, "Creator": None} if path.suffix == ".svg" else {}), BytesIO()
        figure.savefig(image, format=path.suffix[1:], dpi=120, metadata=plain)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, image.getvalue(), durable=False)


def _draw(axes: Axes, curves: Mapping[str, Mapping[int, float]], baselines: Mapping[str, float]) -> None:
    styles = ((colour, style) for style in STYLES for colour in COLOURS)
    for (label, curve), (colour, style) in zip(curves.items(), cycle(styles), strict=False):
        steps = sorted(curve)
        axes.plot(steps, [curve[s] for s in steps], label=label, color=colour, linestyle=style, linewidth=1.5)
    for label, value in baselines.items():
        axes.axhline(value, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            label, (0.0, value), xycoords=("axes fraction", "data"), xytext=(4, 3), textcoords="offset points"
        )
    axes.grid(visible=True, linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
