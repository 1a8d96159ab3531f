"""One run of the whole ring for the benchmark of asynchrony: real processes, the demo's world and model.

The rollout side (Redis, retriever, engine, rollout server) runs on one core and the learner on another one, at every
`max_lag` alike, as on a cluster each runs on its own machines. Without that, each side would use both cores while the
other one waits, and the run at lag 0 would not show how long each side takes alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.bench.base import Say
from deploy.bench.machine import tree_cpu_seconds
from deploy.demo.prepare import DemoOptions, prepare
from deploy.launcher import Launcher
from deploy.observe import read_books
from protocol.errors import ForayError

DISCARDED = ("filtered", "stale", "dead")
LAST_STEPS = 10
"""Steps over which the final exact match is a mean."""


@dataclass(frozen=True)
class Window:
    """Steps `first` < step <= `last` are measured: the rest fills and drains the buffers."""

    first: int
    last: int


@dataclass
class CpuSamples:
    """Processor seconds of all processes since their start, by the learner's step at which they were read."""

    by_step: dict[int, float] = field(default_factory=dict)

    def look(self, step: int, pids: Sequence[int]) -> None:
        """Read them once a step."""
        if step not in self.by_step:
            self.by_step[step] = sum(tree_cpu_seconds(pid) for pid in pids)

    def between(self, window: Window) -> tuple[int, int, float]:
        """First and last step that were seen in `window`, and the processor seconds between them."""
        seen = sorted(step for step in self.by_step if window.first <= step <= window.last)
        if len(seen) < 2:
            raise ForayError(f"only {len(seen)} steps in {window} were seen: measure more --steps")
        return seen[0], seen[-1], self.by_step[seen[-1]] - self.by_step[seen[0]]


def play(options: DemoOptions, window: Window, *, pin: bool, say: Say) -> dict[str, Any]:
    """Run it and return its row of figures. Raises ProcessFailed, and ForayError when a process had to be restarted."""
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
            raise ForayError(f"{', '.join(restarted)} died and was started again: that run measures something else")
    directory = prepared.config.run.dir
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    books = read_books(directory)
    return {
        **figures(steps, window, samples),
        "groups_discarded": sum(books.counts.get(name, 0) for name in DISCARDED) if books else 0,
    }


def figures(steps: Sequence[Mapping[str, Any]], window: Window, samples: CpuSamples) -> dict[str, Any]:
    """What the learner's records, one a step, say of the window.

    wait_s, train_s  of a mean step: waiting for groups, and everything else (compute, publish, checkpoint). At lag 0
                     the learner waits exactly while the ring generates.
    cores_used       processor seconds of a second, all processes; about 1 at lag 0, and more above it
    lag_mean         mean age of the trained tokens, in steps
    em_last          mean exact match in training of the run's last LAST_STEPS steps; None where none has one
    """
    by_step = {record["step"]: record for record in steps}
    inside = [by_step[n] for n in range(window.first + 1, window.last + 1)]
    tokens = sum(record["tokens_trained"] for record in inside)
    seconds = by_step[window.last]["time_s"] - by_step[window.first]["time_s"]
    wait = sum(record["seconds"]["wait"] for record in inside)
    low, high, cpu_s = samples.between(window)
    sampled = sum(by_step[n]["tokens_trained"] for n in range(low + 1, high + 1))
    # a step in which no trajectory voted has no exact match
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
    """A core for the rollout side and one for the learner; none where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


@contextmanager
def _on(core: int | None) -> Iterator[None]:
    """What is started in the block runs on `core` only, and so does all that it starts."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def warm_model(directory: Path, say: Say) -> Path:
    """The demo's warm-started model of seed 0 in `directory`, made if there is none; only a whole one is ever seen."""
    from deploy.demo.warmstart import warm_start

    if not directory.exists():
        building = directory.with_name(f"{directory.name}-building")
        warm_start(building, 0, say)
        building.rename(directory)
    return directory
