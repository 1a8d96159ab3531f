"""Print the learning curves of one or several runs at equal steps, from their `metrics.jsonl`.

With --plot also write a plot, smoothed over as many steps as one row of the table averages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from deploy.run.history import RENAMED, read_curves
from deploy.terminal import aligned
from protocol.errors import UserError

HEADLINE, EVERY, VALIDATION = "reward/em", 10, "validation/"
OVERVIEW = (
    "reward_mean",
    HEADLINE,
    "response_length_mean",
    "turns_mean",
    "searches_mean",
    "entropy",
    "kl_behaviour",
    "kl_reference",
    "lag_mean",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray curves`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run directories")
    fields = f"a field of metrics.jsonl, or validation/SUITE/METRIC (default: an overview: {', '.join(OVERVIEW)})"
    parser.add_argument("--metric", action="append", default=[], help=f"{fields}; repeatable")
    text = f"steps averaged into one row (default: {EVERY}; 1 for runs shorter than {3 * EVERY} steps)"
    parser.add_argument("--every", type=int, help=text)
    parser.add_argument("--labels", default="", metavar="A,B,...", help="names of the runs, in the same order")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also plot the curves to an .svg or .png file")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a horizontal line in the plot; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the means of `--every` steps each; the last row of a run is the mean of the remaining steps."""
    wanted = [RENAMED.get(metric, metric) for metric in args.metric]
    if args.every is not None and args.every < 1:
        raise UserError(f"--every {args.every} is not a number of steps", todo="give 1 or more")
    runs = dict(zip(labels_of(args.runs, args.labels), args.runs, strict=True))
    found: dict[str, dict[str, dict[int, float]]] = {label: {} for label in runs}
    for label, directory in runs.items():
        for metric in wanted or [None]:
            found[label] |= chosen_curves(directory, metric)
    metrics = [m for m in wanted or OVERVIEW if any(m in curves for curves in found.values())]
    sparse = any(metric.startswith(VALIDATION) for metric in wanted)
    longest = max((max(curve, default=0) for curves in found.values() for curve in curves.values()), default=0)
    every: int = args.every or (EVERY if longest >= 3 * EVERY and not sparse else 1)
    steps = {metric: {label: curves.get(metric, {}) for label, curves in found.items()} for metric in metrics}
    shown = wanted[0] if wanted else HEADLINE
    if args.plot and len(wanted) > 1:
        raise UserError("--plot draws one metric", todo="give one --metric, or leave out --plot")
    if args.plot and shown not in steps:
        fields = sorted({field for directory in args.runs for field in read_curves(directory)})
        todo = f"give --metric one of {', '.join(fields)}" if fields else "wait for the first step"
        raise UserError(f"no step has {shown} yet, so there is nothing to plot", todo=todo)
    if args.plot:
        from foray.watch.plot import plot_curves

        smooth = {label: running_means(curve, every) for label, curve in steps.get(shown, {}).items()}
        lines = baselines_of(args.baseline)
        plot_curves(args.plot, smooth, metric=shown, every=every, baselines=lines)
    rows = {metric: {label: windows(curve, every) for label, curve in of.items()} for metric, of in steps.items()}
    if args.json:
        print(json.dumps({"metric": shown, "every": every, "curves": rows.get(shown, {}), "metrics": rows}))
    elif not longest:
        print("no step has been trained yet")
    elif args.metric or len(runs) > 1:
        print("\n\n".join(render(curves, metric, every) for metric, curves in rows.items()))
    else:
        label = next(iter(runs))
        print(f"{label}, means of {every} steps" if every > 1 else label)
        print(by_step({metric: curves[label] for metric, curves in rows.items()}))
    return 0


def labels_of(runs: Sequence[Path], given: str) -> list[str]:
    """Return one label per run, from the list `given` or the directories. Raises UserError if they do not match."""
    labels = [label.strip() for label in given.split(",")] if given else [str(directory) for directory in runs]
    if len(labels) != len(runs):
        raise UserError(f"{len(labels)} labels for {len(runs)} runs", todo="give --labels one name per run")
    if len(set(labels)) < len(labels):
        raise UserError("two runs have the same name", todo="give them different names with --labels")
    return labels


def baselines_of(given: Sequence[str]) -> dict[str, float]:
    """Parse NAME=VALUE items. Raises UserError for an invalid one."""
    lines: dict[str, float] = {}
    for item in given:
        name, _, value = item.rpartition("=")
        try:
            lines[name] = float(value)
        except ValueError:
            raise UserError(f"--baseline {item!r} is not of the form NAME=VALUE") from None
    return lines


def chosen_curves(directory: Path, metric: str | None) -> dict[str, dict[int, float]]:
    """Return metric -> step -> value, for `metric` or the overview.

    Raises UserError if there is no run or no such field.
    """
    path = directory / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"no run found in {directory}", why=f"{path} does not exist")
    known = read_curves(directory)
    if metric and known and metric not in known:
        raise UserError(f"{path} has no field {metric!r}", todo=f"choose one of {', '.join(sorted(known))}")
    return {name: known.get(name, {}) for name in ([metric] if metric else OVERVIEW) if metric or name in known}


def windows(curve: dict[int, float], every: int) -> dict[int, float]:
    """Return last step of each window -> mean over the window; the last window holds the remaining steps."""
    last_step = max(curve, default=0)
    means = {}
    if 0 in curve:  # the initial model
        means[0] = curve[0]
    for before in range(0, last_step, every):
        last = min(before + every, last_step)
        values = [curve[step] for step in range(before + 1, last + 1) if step in curve]
        if values:
            means[last] = sum(values) / len(values)
    return means


def running_means(curve: dict[int, float], every: int) -> dict[int, float]:
    """Return step -> mean of the `every` steps up to it, from the first full window on; agrees with `windows`."""
    if every == 1:
        return dict(curve)
    means = {}
    every = min(every, max(curve, default=every))
    for last in range(every, max(curve, default=0) + 1):
        values = [curve[step] for step in range(last - every + 1, last + 1) if step in curve]
        if values:
            means[last] = sum(values) / len(values)
    return means


def render(curves: dict[str, dict[int, float]], metric: str, every: int) -> str:
    """Return a table; for several runs also the largest difference at equal steps and the one in the last row."""
    names = list(curves)
    lines = [f"{metric}, means of {every} steps" if every > 1 else metric, by_step(curves)]
    if len(names) > 1 and (spread := spreads(list(curves.values()))):
        last = max(spread)
        widest = max(spread, key=lambda step: spread[step])
        lines.append(
            f"largest difference {spread[widest]:.3f} at step {widest}; at the last step {last}: {spread[last]:.3f}"
        )
    return "\n".join(lines)


def by_step(columns: dict[str, dict[int, float]]) -> str:
    """Return a table of column -> step -> value, with one row per step."""
    steps = sorted({step for curve in columns.values() for step in curve})
    cells = ([f"{curve[step]:.3f}" if step in curve else "" for curve in columns.values()] for step in steps)
    rows = ((str(step), *row) for step, row in zip(steps, cells, strict=True))
    return "\n".join(aligned(("step", *columns), rows, numbers_from=0))


def spreads(curves: Sequence[dict[int, float]]) -> dict[int, float]:
    """Return step -> largest minus smallest value, at the steps that all runs have."""
    common = set(curves[0]).intersection(*curves[1:])
    return {step: max(c[step] for c in curves) - min(c[step] for c in curves) for step in sorted(common)}
