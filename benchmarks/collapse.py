"""A small world in which GRPO collapses, and what helps: runs of the demo, one result file each, and their table.

    python -m benchmarks.collapse search                     which settings fall, two seeds each
    python -m benchmarks.collapse confirm --setting NAME     the chosen one in five fresh seeds
    python -m benchmarks.collapse remedies --setting NAME    the same seeds with each remedy
    python -m benchmarks.collapse healthy                    ten runs that must raise no alarm
    python -m benchmarks.collapse table                      docs/collapse.md and its plots, from the result files

Each run writes docs/figures/collapse/NAME.json and is not repeated while that file exists: commit each, and start the
command again after an interruption, which goes on from the run's last checkpoint. A run is the ring of `foray demo`
without its evaluations; runs of one seed share its warm start. What differs from the demo's settings is in the name:
lag8-lr3-mb4 has max_lag 8, three times the learning rate, and 4 minibatches a step; -r1: with Search-R1's schedule, a
long warm-up to a constant rate.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any

from benchmarks.base import Say, machine_facts
from deploy.config import RunConfig, load_config
from deploy.run.history import PAST, RunHistory, read_steps
from deploy.run.learning import SIGNS, active_signs, learning_state
from foray.commands.watch.curves import running_means
from foray.demo.run import CONFIG_COPY
from foray.evaluation.statistics import interval, paired_test
from foray.watch.plot import COLOURS, figure_of
from protocol.errors import ForayError, UserError
from protocol.runtime.files import atomic_write

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "figures" / "collapse"
TEMPLATE, PAGE = FOLDER / "page.template", ROOT / "docs" / "collapse.md"
RUNS = Path("runs/collapse")
STEPS = 150
LR = {"hard": 5.0e-4, "demo": 1.0e-3}
SETTINGS = (
    *("lag8-lr3-mb1-r1", "lag8-lr6-mb1-r1", "lag8-lr1-mb4-r1", "lag1-lr6-mb1-r1", "lag4-lr3-mb1-r1"),
    *("lag8-lr3-mb4-r1", "lag1-lr3-mb4-r1", "lag8-lr3-mb1", "lag1-lr1-mb1"),
    *("lag8-lr2-mb4-r1", "lag8-lr4-mb1-r1"),  # between those that fall in one seed and those that fall at once
)
"""Of the search."""
SEARCH_R1 = ("learner.optim.schedule=constant", "learner.optim.warmup_steps=0", "learner.optim.warmup_fraction=0.285")
"""Search-R1's schedule. With that of the demo, three times its learning rate falls in ten steps, before any rise."""
PANELS = 5
"""Panels of a plot side by side."""
DEAD = 30
"""Steps without a right answer after which a run is stopped: without a gradient nothing changes any more."""
REMEDIES = {
    "preserve.1": ("learner.algorithm.preserve.coefficient=0.1",),
    "preserve.2": ("learner.algorithm.preserve.coefficient=0.2",),
    "calibadv": ("learner.algorithm.turns=calibrated",),
}
HEALTHY_SETTING = "lag1-lr1-mb1"
SEARCHED, FRESH, HEALTHY = (0, 1), (10, 11, 12, 13, 14), (20, 21, 22, 23, 24)
"""Seeds: thresholds may be chosen on the first, never on the others."""
METRICS = ("reward_mean", *(s.metric for s in SIGNS if s.metric != "reward_mean"), "fell_trajectories", "lag_mean")


@dataclass(frozen=True)
class Planned:
    """A run: a level of the demo and a setting, a remedy ("": none), a seed."""

    setting: str
    remedy: str
    seed: int
    level: str = "hard"

    @property
    def name(self) -> str:
        """Return the name of its result file."""
        return "-".join(part for part in (self.level, self.setting, self.remedy, f"seed{self.seed}") if part)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return what differs from the demo. Raises UserError for a setting that has another form."""
        if not (found := re.fullmatch(r"lag(\d+)-lr(\d+)-mb(\d+)(-r1)?", self.setting)):
            raise UserError(f"{self.setting} is not a setting", todo="write it as lag8-lr3-mb4 or lag8-lr3-mb4-r1")
        lag, factor, minibatches = map(int, found.groups()[:3])
        return (
            f"run.steps={STEPS}",
            f"run.max_lag={lag}",
            f"learner.optim.lr={LR[self.level] * factor}",
            f"learner.algorithm.minibatches={minibatches}",
            "learner.checkpoint_every=50",
            *(SEARCH_R1 if found[4] else ()),
            *REMEDIES.get(self.remedy, ()),
        )


def planned(phase: str, setting: str) -> list[Planned]:
    """Return the runs of a phase in their order."""
    if phase == "search":
        return [Planned(s, "", seed) for seed in SEARCHED for s in ([setting] if setting else SETTINGS)]
    if phase == "healthy":
        return [Planned(HEALTHY_SETTING, "", seed, level) for seed in HEALTHY for level in LR]
    if not setting:
        raise UserError(f"{phase} needs a setting", todo="choose one that fell in the search: --setting lag8-lr3-mb4")
    return [Planned(setting, remedy, seed) for seed in FRESH for remedy in ([""] if phase == "confirm" else REMEDIES)]


def play(run: Planned, say: Say) -> dict[str, Any]:
    """Run it, or go on with it, and return its result: curves, cost, machine. Raises ProcessFailed or RunStopped."""
    directory = RUNS / run.name
    cpu_s = train(directory, lambda: _prepared(run, directory, say), say)
    records = read_steps(directory / "metrics.jsonl")
    if len(records) < STEPS and not is_dead(records):
        raise ForayError(f"{run.name} ended at step {len(records)} of {STEPS}")
    return {
        **asdict(run),
        "overrides": run.overrides,
        "curves": {m: [float(f"{r[m]:.4g}") if m in r else None for r in records.values()] for m in METRICS},
        "cpu_s": round(cpu_s, 1),
        "machine": machine_facts(),
    }


def train(directory: Path, prepared: Callable[[], RunConfig], say: Say, *, to_end: bool = False) -> float:
    """Run the ring until the learner ends, or is dead unless `to_end`. Return the CPU seconds of all starts.

    An interrupted run goes on from its last checkpoint. Raises ProcessFailed or RunStopped.
    """
    from deploy.launch.launcher import Launcher

    spent, before = directory / "cpu_s", _cpu_s()
    config = load_config(directory / CONFIG_COPY) if spent.exists() else prepared()
    earlier = float(spent.read_text()) if spent.exists() else 0.0
    metrics = directory / "metrics.jsonl"
    try:
        with Launcher(config, say=say) as launcher:
            launcher.start()
            while not (launcher.supervisor.ended("learner") or (not to_end and is_dead(read_steps(metrics)))):
                launcher.check()
                time.sleep(0.5)
            launcher.check()
    finally:
        spent.write_text(str(earlier + _cpu_s() - before))
    return float(spent.read_text())


def _cpu_s() -> float:
    """Return the CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _prepared(run: Planned, directory: Path, say: Say) -> RunConfig:
    """Make the run directory and return the run's configuration."""
    from foray.demo.run import DemoOptions, prepare

    model, hard = warm_model(run, say), run.level == "hard"
    return prepare(DemoOptions(directory, run.seed, False, model, run.overrides, fresh=True, hard=hard), say).config


def is_dead(steps: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether no trajectory of the last DEAD steps has earned anything."""
    last = list(steps.values())[-DEAD:]
    return len(last) == DEAD and not any(record.get("reward_mean") for record in last)


def warm_model(run: Planned, say: Say) -> Path:
    """Return the warm start of the run's level and seed; make it, atomically, if it is missing."""
    from foray.demo.warmstart import warm_start
    from foray.demo.world import HARD, SHORT

    path = RUNS / f"warm-{run.level}-{run.seed}"
    if not path.exists():
        building = path.with_name(f"{path.name}-building-{time.time_ns()}")
        warm_start(building, run.seed, say, level=HARD if run.level == "hard" else SHORT)
        try:
            building.rename(path)
        except OSError:
            if not path.exists():
                raise
            shutil.rmtree(building)  # another process has made the same
    return path


@dataclass(frozen=True)
class Judged:
    """A run and what its result shows.

    best, best_step  largest mean reward over a tenth of the steps, and the last of them
    last             mean reward over the last tenth
    fall             step from which on the mean over a tenth stays below half of the best; None: it has not fallen
    alarm            first step at which the run's state is `collapsing`
    early            the same without the reward as a sign
    signs            sign -> first step at which it speaks
    """

    run: Planned
    rewards: Sequence[float]
    cpu_s: float
    best: float
    best_step: int
    last: float
    fall: int | None
    alarm: int | None
    early: int | None
    signs: Mapping[str, int]


def judge(result: Mapping[str, Any]) -> Judged:
    """Return what a result shows, with the thresholds of `deploy/run/learning.py` as the run applies them."""
    rewards = [r or 0.0 for r in result["curves"]["reward_mean"]]
    rewards += [0.0] * (STEPS - len(rewards))  # of a run that was stopped because it is dead
    tenth = max(1, len(rewards) // 10)
    means = {n: fmean(rewards[n - tenth : n]) for n in range(tenth, len(rewards) + 1)}
    best_step = max(means, key=lambda n: means[n])
    above = max(n for n in means if 2 * means[n] >= means[best_step])
    records = [
        {m: v for m, v in zip(result["curves"], values, strict=True) if v is not None}
        for values in zip(*result["curves"].values(), strict=True)
    ]
    signs: dict[str, int] = {}
    alarms: dict[bool, int] = {}
    for step in range(1, len(records) + 1):
        speak = active_signs(history := RunHistory(past=tuple(records[max(0, step - PAST) : step])))
        for sign in speak:
            signs.setdefault(sign.metric, step)
        if learning_state(history).word == "collapsing":
            alarms.setdefault(True, step)
        if sum(not sign.alone for sign in speak) > 1:
            alarms.setdefault(False, step)
    run = Planned(**{field.name: result[field.name] for field in fields(Planned)})
    fall, last = above + 1 if above < len(rewards) else None, means[len(rewards)]
    shown = (means[best_step], best_step, last, fall, alarms.get(True), alarms.get(False), signs)
    return Judged(run, rewards, result["cpu_s"], *shown)


def of(judged: Sequence[Judged], setting: str, remedy: str, seeds: Sequence[int], level: str = "hard") -> list[Judged]:
    """Return the results of a setting and remedy in these seeds, in their order."""
    return [j for j in judged if j.run in {Planned(setting, remedy, seed, level) for seed in seeds}]


def rows_of_runs(judged: Sequence[Judged]) -> list[str]:
    """Return a table, one row for each run."""
    head = "| run | best, at step | last tenth | falls at | alarm | without the reward | signs, first step | CPU s |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for j in judged:
        signs = ", ".join(f"{name} {step}" for name, step in sorted(j.signs.items(), key=lambda item: item[1]))
        steps = " | ".join("" if step is None else str(step) for step in (j.fall, j.alarm, j.early))
        lines.append(
            f"| {j.run.name} | {j.best:.3f}, {j.best_step} | {j.last:.3f} | {steps} | {signs} | {j.cpu_s:.0f} |"
        )
    return lines


def rows_of_arms(judged: Sequence[Judged], setting: str) -> list[str]:
    """Return a table, one row for each remedy: means over the same seeds with 95 % intervals, differences in pairs."""
    head = "| arm | seeds | falls | best | last tenth | last tenth, difference | announced | steps before, median |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    plain = {j.run.seed: j.last for j in of(judged, setting, "", FRESH)}
    for remedy in ("", *REMEDIES):
        if not (arm := of(judged, setting, remedy, FRESH)):
            continue
        best, last = (interval({"": [getattr(j, name) for j in arm]}) for name in ("best", "last"))
        pairs = [(plain[j.run.seed], j.last) for j in arm if remedy and j.run.seed in plain]
        test = paired_test({"": [a for a, _ in pairs]}, {"": [b for _, b in pairs]})
        difference = f"{test.difference:+.3f} ({test.low:+.3f} to {test.high:+.3f})" if pairs else ""
        fallen = [j for j in arm if j.fall is not None]
        leads = [j.fall - j.early for j in fallen if j.fall is not None and j.early is not None and j.early < j.fall]
        cells = (
            *(remedy or "coefficient 0", len(arm), len(fallen)),
            *(f"{e.mean:.3f} ({e.low:.3f} to {e.high:.3f})" for e in (best, last)),
            *(difference, f"{len(leads)} of {len(fallen)}", f"{median(leads):.0f}" if leads else ""),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def write_table() -> None:
    """Write docs/collapse.md and its plots from the results that there are."""
    judged = [judge(json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]
    healthy = [j for level in LR for j in of(judged, HEALTHY_SETTING, "", HEALTHY, level)]
    parts = {"search": [j for s in SETTINGS for j in of(judged, s, "", SEARCHED)], "healthy": healthy}
    tried = sorted({j.run.setting for j in judged if j.run.seed in FRESH})
    parts |= {s: [j for remedy in ("", *REMEDIES) for j in of(judged, s, remedy, FRESH)] for s in tried}
    tables = {name: "\n".join(rows_of_runs(runs)) if runs else "Not run yet." for name, runs in parts.items()}
    for name, runs in parts.items():
        if runs:
            curves = {j.run.name: (running_means(dict(enumerate(j.rewards, 1)), 5), j.signs) for j in runs}
            _plot_panels(PAGE.with_name(f"collapse-{name}.png"), curves, metric="mean reward, mean of 5 steps")
            tables[name] += f"\n\n![Mean reward of each run, and the first step of each sign](collapse-{name}.png)"
    arms = [f"### {s}\n\n" + "\n".join(rows_of_arms(judged, s)) + f"\n\n{tables.pop(s)}" for s in tried]
    alarms = sum(j.alarm is not None for j in healthy)
    hours = sum(j.cpu_s for j in judged) / 3600
    tables |= {
        "remedies": "\n\n".join(arms) or "Not run yet.",
        "alarms": f"{alarms} of {len(healthy)} runs raised an alarm.",
        "cost": f"{len(judged)} runs, {hours:.1f} CPU hours.",
    }
    atomic_write(PAGE, Template(TEMPLATE.read_text()).substitute(tables).encode(), durable=False)


def _plot_panels(
    path: Path, panels: Mapping[str, tuple[Mapping[int, float], Mapping[str, int]]], *, metric: str
) -> None:
    """Write an SVG or PNG with a panel for each {title: (step -> value, name of an event -> its step)}, events on top.

    Raises UserError if matplotlib is not installed, or for another file type.
    """
    columns = min(PANELS, len(panels))
    rows = -(-len(panels) // columns)
    top = 2 * max(max(curve.values()) for curve, _ in panels.values())
    with figure_of(path, (2.6 * columns, 1.6 * rows)) as figure:
        for place, (title, (curve, events)) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, columns, place)
            axes.plot(list(curve), list(curve.values()), color=COLOURS[0], linewidth=1.2)
            axes.set_title(title, fontsize=7, loc="left")
            axes.set_ylim(0, top)
            axes.tick_params(labelsize=6, labelleft=place % columns == 1, labelbottom=place > len(panels) - columns)
            for number, (event, step) in enumerate(sorted(events.items(), key=lambda item: item[1])):
                height = top * (0.94 - 0.07 * number)
                axes.plot([step, step], [0, height], color=COLOURS[3], linewidth=0.4)
                axes.annotate(f"{event} {step}", (step, height), fontsize=5, va="center")
            axes.grid(visible=True, linewidth=0.4, alpha=0.6)
        figure.supxlabel(f"step; {metric}", fontsize="small")


def main(argv: Sequence[str] | None = None) -> int:
    """Make the runs of a phase that have no result yet, or the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collapse", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("phase", choices=["search", "confirm", "remedies", "healthy", "table"])
    parser.add_argument("--setting", default="", metavar="NAME", help="e.g. lag8-lr3-mb4; search: only this one")
    parser.add_argument("--most", type=int, default=1_000, metavar="N", help="make at most N runs")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)

    if args.phase == "table":
        write_table()
        return 0
    missing = [run for run in planned(args.phase, args.setting) if not (FOLDER / f"{run.name}.json").exists()]
    for run in missing[: args.most]:
        say(f"{run.name}: {' '.join(run.overrides)}")
        result = play(run, say)
        FOLDER.mkdir(parents=True, exist_ok=True)
        atomic_write(FOLDER / f"{run.name}.json", (json.dumps(result) + "\n").encode(), durable=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
