"""`foray bench async`: benefit and cost of training on data that is a few steps old.

The whole ring runs at several `max_lag`, from the same warm-started model, with the same seeds. At lag 0 generation
and training alternate: the learner waits for exactly the time of generation, the rest is training. A ring that overlaps
them takes at least the longer of the two, so the bound of the speed-up is (generation + training) / max(both), measured
in the same run. Value: trained tokens/s at lag 1. Ratio: that over lag 0.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from benchmarks.base import BenchResult, BenchSettings, Say, Target, tree_cpu_seconds
from benchmarks.report import digest
from protocol.errors import ForayError

if TYPE_CHECKING:
    from foray.demo.run import DemoOptions

DISCARDED = ("filtered", "stale", "dead")
LAST_STEPS = 10
"""Number of steps over which the final exact match is averaged."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Measure steps `first` < step <= `last`: the others fill and drain the buffers."""

    first: int
    last: int


@dataclass
class CpuSamples:
    """CPU seconds of all processes since their start, by the learner's step at the time of reading."""

    by_step: dict[int, float] = field(default_factory=dict)

    def look(self, step: int, pids: Sequence[int]) -> None:
        """Read them once per step."""
        if step not in self.by_step:
            self.by_step[step] = sum(tree_cpu_seconds(pid) for pid in pids)

    def between(self, window: MeasuredSteps) -> tuple[int, int, float]:
        """Return the first and the last observed step in `window`, and the CPU seconds between them."""
        seen = sorted(step for step in self.by_step if window.first <= step <= window.last)
        if len(seen) < 2:
            raise ForayError(f"only {len(seen)} steps in {window} were observed: raise --steps")
        return seen[0], seen[-1], self.by_step[seen[-1]] - self.by_step[seen[0]]


def play(options: DemoOptions, window: MeasuredSteps, *, pin: bool, say: Say) -> dict[str, Any]:
    """Run the whole ring and return its figures.

    pin  pin the rollout side (Redis, retriever, engine, rollout server) to one core and the learner to another, as on
         a cluster with separate machines. Otherwise each side would use both cores while the other waits, and the run
         at lag 0 would not show how long each side takes alone.

    Raises ProcessFailed, and ForayError if a process had to be restarted.
    """
    from deploy.launch.launcher import Launcher
    from deploy.run.history import read_steps
    from foray.demo.run import prepare

    prepared = prepare(options, say)
    samples = CpuSamples()
    rollout_core, learner_core = _cores() if pin else (None, None)
    with Launcher(prepared.config, say=say) as launcher:
        with _on(rollout_core):
            launcher.start("redis", "retriever", "engine", "rollout")
        with _on(learner_core):
            launcher.start("learner")
        while not launcher.supervisor.ended("learner"):
            launcher.check()
            if step := launcher.last_step.get("step"):
                samples.look(step, [child.pid for child in launcher.supervisor.children.values()])
            time.sleep(0.05)
        if restarted := launcher.supervisor.restarts:
            raise ForayError(f"{', '.join(restarted)} exited and was restarted, so the measurement is invalid")
    directory = prepared.config.run.dir
    steps = list(read_steps(directory / "metrics.jsonl").values())
    from deploy.run.snapshot import read_ledger_totals

    totals = read_ledger_totals(directory)
    return {
        **figures(steps, window, samples),
        "groups_discarded": sum(totals.counts.get(name, 0) for name in DISCARDED) if totals else 0,
    }


def figures(steps: Sequence[Mapping[str, Any]], window: MeasuredSteps, samples: CpuSamples) -> dict[str, Any]:
    """Return the figures of the window from the learner's records, one per step.

    wait_s, train_s  mean per step: waiting for groups, and everything else (compute, publish, checkpoint). At lag 0
                     the learner waits exactly while the ring generates.
    cores_used       CPU seconds per second of all processes; about 1 at lag 0, and more above it
    lag_mean         mean lag of the trained tokens, in steps
    em_last          mean exact match in training over the last LAST_STEPS steps; None if no step has one
    """
    by_step = {record["step"]: record for record in steps}
    inside = [by_step[n] for n in range(window.first + 1, window.last + 1)]
    tokens = sum(record["tokens_trained"] for record in inside)
    seconds = by_step[window.last]["time_s"] - by_step[window.first]["time_s"]
    wait = sum(record["seconds"]["wait"] for record in inside)
    low, high, cpu_s = samples.between(window)
    sampled = sum(by_step[n]["tokens_trained"] for n in range(low + 1, high + 1))
    # a step without a valid trajectory has no exact match
    last = [record["reward/em"] for record in steps[-LAST_STEPS:] if "reward/em" in record]
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": sampled / cpu_s,
        "cores_used": tokens / seconds * cpu_s / sampled,
        "step_s": seconds / len(inside),
        "wait_s": wait / len(inside),
        "train_s": (seconds - wait) / len(inside),
        "em_last": sum(last) / len(last) if last else None,
        "lag_mean": sum(r["lag_mean"] * r["tokens_trained"] for r in inside) / tokens,
        "lag_max": max(record["lag_max"] for record in inside),
        "tokens_stale": sum(record["tokens_stale"] for record in inside),
    }


def _cores() -> tuple[int | None, int | None]:
    """Return a core for the rollout side and one for the learner; None if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


@contextmanager
def _on(core: int | None) -> Iterator[None]:
    """Pin processes started in the block, and their children, to `core`."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def warm_model(directory: Path, say: Say) -> Path:
    """Return the demo's warm-started model of seed 0 in `directory`; create it, atomically, if it is missing."""
    from foray.demo.warmstart import warm_start

    if not directory.exists():
        building = directory.with_name(f"{directory.name}-building")
        warm_start(building, 0, say)
        building.rename(directory)
    return directory


Row = Mapping[str, Any]


class AsyncBench(BenchSettings):
    """Settings of `foray bench async`."""

    help: ClassVar[str] = "the whole ring at several max_lag, against lag 0 and against the ideal overlap"
    quick: ClassVar[dict[str, Any]] = {"steps": 12, "skip": 3, "seeds": (0,), "lags": (0, 1), "groups_per_step": 8}
    targets: ClassVar[tuple[Target, ...]] = (Target("of_bound", 0.9, "speed-up at lag 1 over the bound"),)
    modules: ClassVar[tuple[str, ...]] = (
        *("protocol", "rollout_server", "learner", "retriever", "foray/demo"),
        "benchmarks/asynchrony.py",
    )

    lags: tuple[int, ...] = Field(default=(0, 1, 2, 4), min_length=2)
    """Values of run.max_lag, including 0: 0,1,2,4."""
    seeds: tuple[int, ...] = Field(default=(0, 1), min_length=1)
    """Random seeds of world, questions and sampler, each used with each lag: 0,1."""
    steps: int = Field(default=36, ge=1)
    """Optimiser steps per run."""
    skip: int = Field(default=5, ge=1)
    """Number of first steps that are not measured. The last ones (largest lag + 1) are not measured either: by then
    everything is generated, and a run with a large lag only trains."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups (of 8 trajectories) per batch."""
    model: Path | None = None
    """Warm-started model of the demo. None: create one first, which takes a minute or two."""
    dir: Path | None = None
    """Folder for the model and the figures of each run; existing results are reused. None: keep nothing."""
    pin: bool = True
    """Pin the learner to one core and all other processes to another, at every lag."""
    overrides: tuple[str, ...] = ()
    """Further settings of the demo for all runs, comma-separated: learner.optim.lr=0.0005."""

    @field_validator("lags", "seeds", "overrides", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(item for item in value.split(",") if item) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _enough(self) -> AsyncBench:
        if 0 not in self.lags or max(self.lags) == 0 or len(set(self.lags)) < len(self.lags):
            raise ValueError(f"lags {self.lags} must be different and contain 0 and another one")
        if self.last_step - self.skip < 2:
            raise ValueError(
                f"steps = {self.steps} leaves fewer than 2 to measure: {self.skip} and the last are skipped"
            )
        return self

    @property
    def last_step(self) -> int:
        """Return the last step to measure."""
        return self.steps - max(self.lags) - 1

    def measure(self, say: Say) -> BenchResult:
        """Run each lag once per seed, in turn, so that other load on the machine affects all lags alike."""
        with ExitStack() as stack:
            directory = self.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foray-bench-")))
            directory.mkdir(parents=True, exist_ok=True)
            model = self.model or warm_model(directory / "model", say)
            rows = [self._row(directory, model, seed, lag, say) for seed in self.seeds for lag in self.lags]
        return summary(rows)

    def _row(self, directory: Path, model: Path, seed: int, lag: int, say: Say) -> Row:
        from foray.demo.run import DemoOptions

        name = f"seed-{seed}-lag-{lag}"

        def run() -> Row:
            options = DemoOptions(directory / name, seed, model=model, overrides=self._overrides(lag), fresh=True)
            window = MeasuredSteps(self.skip, self.last_step)
            row = play(options, window, pin=self.pin, say=lambda line: say(f"{name}: {line}"))
            return {"seed": seed, "max_lag": lag, **row}

        weights = sha256((model / "model.safetensors").read_bytes()).hexdigest()
        same = [self.model_dump(mode="json", exclude={"lags", "seeds", "model", "dir"}), self.last_step, weights]
        row = kept(directory / f"{name}.json", [*same, digest(self.modules)], run)
        em = "not measured" if row["em_last"] is None else f"{row['em_last']:.3f}"
        shown = f"{row['tokens_per_s']:.0f} trained tokens/s, exact match {em}"
        say(f"{name}: {shown}; a step waits {row['wait_s']:.2f} s and trains {row['train_s']:.2f} s")
        return row

    def _overrides(self, lag: int) -> tuple[str, ...]:
        sizes = (f"run.steps={self.steps}", f"run.groups_per_step={self.groups_per_step}")
        return (*sizes, *self.overrides, f"run.max_lag={lag}")


def kept(path: Path, key: object, run: Callable[[], Row]) -> Row:
    """Return the row in `path` if it was measured with the same `key`, else call `run` and save its row."""
    if path.exists():
        found = json.loads(path.read_text())
        if found["key"] == key:
            row: Row = found["row"]
            return row
    row = run()
    path.write_text(json.dumps({"key": key, "row": row}) + "\n")
    return row


def summary(rows: Sequence[Row]) -> BenchResult:
    """Return means over the seeds for each lag; the bound is from the rows at lag 0."""
    by_lag = {
        lag: _means([row for row in rows if row["max_lag"] == lag]) for lag in sorted({r["max_lag"] for r in rows})
    }
    base = by_lag[0]
    first = by_lag[min(lag for lag in by_lag if lag)]
    bound = (base["wait_s"] + base["train_s"]) / max(base["wait_s"], base["train_s"])
    for means in by_lag.values():
        means["speed_up"] = means["tokens_per_s"] / base["tokens_per_s"]
    return BenchResult(
        value=first["tokens_per_s"],
        unit=f"trained tokens/s at max_lag {first['max_lag']:g}",
        baseline={"name": "the same ring at max_lag 0", "tokens_per_s": base["tokens_per_s"]},
        ratio=first["speed_up"],
        details={
            "bound": bound,
            "of_bound": first["speed_up"] / bound,
            "generation_s": base["wait_s"],
            "training_s": base["train_s"],
            "by_lag": list(by_lag.values()),
            "runs": [dict(row) for row in rows],
        },
    )


def _means(rows: Sequence[Row]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0] if name != "seed"}
