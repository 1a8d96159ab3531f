"""The plots of README and docs/algorithms.md, from docs/figures: `python -m benchmarks.pages.plots [FOLDER]`.

They have no background, and colours that are readable on white and on black.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.figures.table import figures, read
from benchmarks.report import ROOT
from foray.commands.watch.curves import running_means
from foray.watch.plot import COLOURS, RC, figure_of, plot_curves

GREY, EVERY = "#7d8590", 20
THEME: Any = {
    "savefig.transparent": True,
    "font.size": 13,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}
HELD_OUT = {"held_out_before": "before", "held_out_after": "after, sampled", "held_out_greedy": "after, greedy"}


@contextmanager
def themed(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """Write the figure that the block fills, in the colours of THEME."""
    with matplotlib.rc_context(THEME), figure_of(path, inches) as figure:
        yield figure


def measured(start: str) -> dict[str, Mapping[str, Any]]:
    """Return the measured figures whose name is `start` and one more part, by that part."""
    known = {name: figure for name, figure in figures().items() if name.rpartition("-")[0] == start}
    return {name.rpartition("-")[2]: found for name, figure in known.items() if (found := read(figure))}


def hard(path: Path) -> None:
    """Plot exact match in training of the hard demo: each seed, and the control with shuffled rewards."""
    curves = {
        "shuffled rewards" if name == "control" else f"seed {name}": running_means(
            dict(enumerate(kept["curve"], 1)), EVERY
        )
        for name, kept in measured("demo-hard").items()
    }
    plot_curves(path, curves, metric="exact match in training", every=EVERY, baselines={})


def algorithms(path: Path) -> None:
    """Plot exact match on questions about a world never trained on, before and after, for each algorithm."""
    found = sorted(measured("compare").items(), key=lambda item: item[1]["held_out_after"])
    with themed(path, (8.0, 5.6)) as figure:
        axes = figure.add_subplot()
        for (key, label), colour, marker in zip(HELD_OUT.items(), (GREY, COLOURS[0], COLOURS[1]), "|o^", strict=True):
            axes.plot([kept[key] for _, kept in found], range(len(found)), marker, color=colour, label=label)
        axes.set_yticks(range(len(found)), [f"{name} ({kept['steps']} steps)" for name, kept in found])
        axes.set_xlim(0, 1.02)
        axes.set_xlabel("exact match on a world never trained on")
        axes.grid(visible=True, linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(HELD_OUT))


def main(folder: Path) -> None:
    """Write the plots into `folder`."""
    with matplotlib.rc_context({**RC, **THEME}):
        hard(folder / "hard.svg")
        algorithms(folder / "algorithms.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
