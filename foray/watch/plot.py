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
    with figure_of(path, (8.0, 4.5)) as figure:
        axes = figure.add_subplot()
        _draw(axes, curves, baselines)
        axes.set_xlabel("step")
        axes.set_ylabel(metric if every == 1 else f"{metric}, mean of {every} steps")


@contextmanager
def figure_of(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """Write the figure that the block fills, as SVG or PNG.

    Raises UserError if matplotlib is not installed, or for another file type.
    """
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
        if path.suffix == ".png":  # a third of the size; lines on white need few colours
            from PIL import Image

            coloured, image = Image.open(image).convert("RGB"), BytesIO()
            coloured.quantize(64).save(image, "PNG", optimize=True)
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
