"""The learning curves of several runs side by side, from their `metrics.jsonl`: one column a run, at equal steps.

With --plot also as a picture, smoothed over as many steps as one row of the table averages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from protocol.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foray curves`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run directories")
    parser.add_argument("--metric", default="em_mean", help="a field of metrics.jsonl (default: em_mean)")
    parser.add_argument("--every", type=int, default=10, help="steps that are averaged into one row (default: 10)")
    parser.add_argument("--labels", default="", metavar="A,B,...", help="names of the runs, in their order")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them into an .svg or .png as well")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a horizontal line in the plot; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the means of `--every` steps each; the last row is the last full window that all runs have reached."""
    if args.every < 1:
        raise UserError(f"--every {args.every} is no number of steps", todo="give 1 or more")
    runs = dict(zip(labels_of(args.runs, args.labels), args.runs, strict=True))
    steps = {label: read_curve(directory, args.metric) for label, directory in runs.items()}
    if args.plot:
        from deploy.plot import plot_curves

        smooth = {label: running_means(curve, args.every) for label, curve in steps.items()}
        lines = baselines_of(args.baseline)
        plot_curves(args.plot, smooth, metric=args.metric, every=args.every, baselines=lines)
    curves = {label: windows(curve, args.every) for label, curve in steps.items()}
    if args.json:
        print(json.dumps({"metric": args.metric, "every": args.every, "curves": curves}))
    else:
        print(render(curves, args.metric, args.every))
    return 0


def labels_of(runs: Sequence[Path], given: str) -> list[str]:
    """A name for each run: as given, with commas, or its directory. Raises UserError when they do not fit."""
    labels = [label.strip() for label in given.split(",")] if given else [str(directory) for directory in runs]
    if len(labels) != len(runs):
        raise UserError(f"{len(labels)} labels for {len(runs)} runs", todo="give --labels one name a run")
    if len(set(labels)) < len(labels):
        raise UserError("two runs have the same name", todo="give each a name of its own in --labels")
    return labels


def baselines_of(given: Sequence[str]) -> dict[str, float]:
    """NAME=VALUE items as name -> value; UserError for one that is none."""
    lines: dict[str, float] = {}
    for item in given:
        name, _, value = item.rpartition("=")
        try:
            lines[name] = float(value)
        except ValueError:
            raise UserError(f"--baseline {item!r} is not of the form NAME=VALUE") from None
    return lines


def read_curve(directory: Path, metric: str) -> dict[int, float]:
    """step -> value; of two lines for one step the later epoch's counts. Raises UserError when there is none."""
    path = directory / "metrics.jsonl"
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        raise UserError(f"there is no run in {directory}", why=f"{path} does not exist") from None
    known = sorted({name for line in lines for name, value in line.items() if isinstance(value, int | float)})
    if lines and metric not in known:
        raise UserError(f"{path} has no field {metric!r}", todo=f"choose one of {', '.join(known)}")
    lines.sort(key=lambda line: (line["step"], line.get("epoch", 0)))
    return {int(line["step"]): float(line[metric]) for line in lines if line.get(metric) is not None}


def windows(curve: dict[int, float], every: int) -> dict[int, float]:
    """Last step of each full window -> mean of the window's steps."""
    edges = range(0, max(curve, default=0) + 1, every)
    means = {}
    for before, last in pairwise(edges):
        values = [curve[step] for step in range(before + 1, last + 1) if step in curve]
        if values:
            means[last] = sum(values) / len(values)
    return means


def running_means(curve: dict[int, float], every: int) -> dict[int, float]:
    """Step -> mean of the `every` steps up to it, from the first full window on; at its edges as in `windows`."""
    means = {}
    for last in range(every, max(curve, default=0) + 1):
        values = [curve[step] for step in range(last - every + 1, last + 1) if step in curve]
        if values:
            means[last] = sum(values) / len(values)
    return means


def render(curves: dict[str, dict[int, float]], metric: str, every: int) -> str:
    """A table; with two runs or more the largest distance at equal steps, and that of the last common row."""
    names = list(curves)
    width = max(12, *(len(name) for name in names)) + 2
    lines = [f"{metric}, means of {every} steps", f"{'step':>6}" + "".join(f"{name:>{width}}" for name in names)]
    for step in sorted({step for curve in curves.values() for step in curve}):
        cells = [f"{curve[step]:.3f}" if step in curve else "" for curve in curves.values()]
        lines.append(f"{step:>6}" + "".join(f"{cell:>{width}}" for cell in cells))
    if len(names) > 1 and (spread := spreads(list(curves.values()))):
        last = max(spread)
        widest = max(spread, key=lambda step: spread[step])
        lines.append(
            f"widest apart at step {widest}: {spread[widest]:.3f}; at step {last}, the last of all: {spread[last]:.3f}"
        )
    return "\n".join(lines)


def spreads(curves: Sequence[dict[int, float]]) -> dict[int, float]:
    """step -> largest minus smallest value, at the steps that every run has."""
    common = set(curves[0]).intersection(*curves[1:])
    return {step: max(c[step] for c in curves) - min(c[step] for c in curves) for step in sorted(common)}
