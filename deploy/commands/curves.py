"""The learning curves of several runs side by side, from their `metrics.jsonl`: one column a run, at equal steps."""

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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the means of `--every` steps each; the last row is the last full window that all runs have reached."""
    if args.every < 1:
        raise UserError(f"--every {args.every} is no number of steps", todo="give 1 or more")
    curves = {str(directory): windows(read_curve(directory, args.metric), args.every) for directory in args.runs}
    if args.json:
        print(json.dumps({"metric": args.metric, "every": args.every, "curves": curves}))
    else:
        print(render(curves, args.metric, args.every))
    return 0


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
