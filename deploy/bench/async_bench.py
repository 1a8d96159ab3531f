"""`foray bench async`: what training on data that is a few steps old buys, and what it costs.

The whole ring runs at several `max_lag`, from the same warm-started model, with the same seeds. At lag 0 generation
and training take turns: the time that the learner waits is generation's, the rest is training's. A ring that overlaps
them can take no less than the longer of the two, so the bound of the speed-up is (generation + training) / max of both,
measured in the same run. Value: trained tokens a second at lag 1; ratio: that over lag 0's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from deploy.bench.base import BenchSettings, Measured, Say, Target
from deploy.bench.modules import digest

Row = Mapping[str, Any]


class AsyncBench(BenchSettings):
    """The ring and its runs."""

    help: ClassVar[str] = "the whole ring at several max_lag, against lag 0 and against the longer of both sides"
    quick: ClassVar[dict[str, Any]] = {"steps": 12, "skip": 3, "seeds": (0,), "lags": (0, 1), "groups_per_step": 8}
    targets: ClassVar[tuple[Target, ...]] = (Target("of_bound", 0.9, "speed-up at lag 1 over the bound"),)
    modules: ClassVar[tuple[str, ...]] = (
        *("protocol", "rollout_server", "learner", "retriever", "deploy/demo", "deploy/configs/demo.yaml"),
        "deploy/bench/async*.py",
    )

    lags: tuple[int, ...] = Field(default=(0, 1, 2, 4), min_length=2)
    """run.max_lag of the runs, 0 among them: 0,1,2,4."""
    seeds: tuple[int, ...] = Field(default=(0, 1), min_length=1)
    """Of world, questions and sampler; each lag runs with each: 0,1."""
    steps: int = Field(default=36, ge=1)
    """Optimiser steps of a run."""
    skip: int = Field(default=5, ge=1)
    """First steps that are not measured. Nor are the last ones, as many as the largest lag and one more: by then
    everything is generated, and a run at a large lag only trains."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups of 8 trajectories in a batch."""
    model: Path | None = None
    """A warm-started model of the demo; none: one is made first, which takes a minute or two."""
    dir: Path | None = None
    """Folder that keeps the model and each run's figures: what is there is not run again. None: keeps nothing."""
    pin: bool = True
    """Run the learner on one core and everything else on another one, at every lag."""
    overrides: tuple[str, ...] = ()
    """More settings of the demo for all runs, with commas: learner.optim.lr=0.0005."""

    @field_validator("lags", "seeds", "overrides", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(item for item in value.split(",") if item) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _enough(self) -> AsyncBench:
        if 0 not in self.lags or max(self.lags) == 0 or len(set(self.lags)) < len(self.lags):
            raise ValueError(f"lags {self.lags} must be different and hold 0 and another one")
        if self.last_step - self.skip < 2:
            raise ValueError(f"steps = {self.steps} leaves fewer than 2 to measure: skip {self.skip} and the last ones")
        return self

    @property
    def last_step(self) -> int:
        """Last step that is measured."""
        return self.steps - max(self.lags) - 1

    def measure(self, say: Say) -> Measured:
        """Seed after seed, at each lag one whole run: what the machine does meanwhile hits all lags alike."""
        from deploy.bench.async_ring import warm_model

        with ExitStack() as stack:
            directory = self.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foray-bench-")))
            directory.mkdir(parents=True, exist_ok=True)
            model = self.model or warm_model(directory / "model", say)
            rows = [self._row(directory, model, seed, lag, say) for seed in self.seeds for lag in self.lags]
        return summary(rows)

    def _row(self, directory: Path, model: Path, seed: int, lag: int, say: Say) -> Row:
        from deploy.bench.async_ring import Window, play
        from deploy.demo.prepare import DemoOptions

        name = f"seed-{seed}-lag-{lag}"

        def run() -> Row:
            options = DemoOptions(directory / name, seed, model=model, overrides=self._overrides(lag), fresh=True)
            window = Window(self.skip, self.last_step)
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
    """The row in `path` if it was measured under the same `key`; else that of `run`, which is then kept there."""
    if path.exists():
        found = json.loads(path.read_text())
        if found["key"] == key:
            row: Row = found["row"]
            return row
    row = run()
    path.write_text(json.dumps({"key": key, "row": row}) + "\n")
    return row


def summary(rows: Sequence[Row]) -> Measured:
    """Means over the seeds for each lag; the bound from the rows at lag 0 alone."""
    by_lag = {
        lag: _means([row for row in rows if row["max_lag"] == lag]) for lag in sorted({r["max_lag"] for r in rows})
    }
    base = by_lag[0]
    first = by_lag[min(lag for lag in by_lag if lag)]
    bound = (base["wait_s"] + base["train_s"]) / max(base["wait_s"], base["train_s"])
    for means in by_lag.values():
        means["speed_up"] = means["tokens_per_s"] / base["tokens_per_s"]
    return Measured(
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
