"""`foray bench dashboard`: what an open dashboard costs the run that it shows.

The demo's ring trains while a client does what the overview page does: it reads `/events` and asks for the page's data
after each look. Windows of some steps with and without the client take turns (closed, open, open, closed), so that the
course of training affects both alike. Value: CPU seconds of learner and rollout server per 1,000 trained tokens with
the page open. Ratio: closed over open.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from benchmarks.asynchrony import warm_model
from benchmarks.base import BenchResult, BenchSettings, Say, Target, cpu_seconds
from protocol.errors import ForayError

if TYPE_CHECKING:
    from deploy.launch.launcher import Launcher

OBSERVED = ("learner", "rollout")
NAMES = "reward_mean,reward/em,searches_mean,response_length_mean,turns_mean,entropy,seconds/wait,seconds/compute"
REQUESTS = ("/api/overview", f"/api/steps?names={NAMES}", "/api/evaluations")
PAGE_S = 0.4
"""The page collects events for this long before it asks for data."""


class DashboardBench(BenchSettings):
    """Settings of `foray bench dashboard`."""

    help: ClassVar[str] = "CPU time of learner and rollout server with the dashboard open and closed, in turn"
    quick: ClassVar[dict[str, Any]] = {"turns": 2, "steps": 1, "skip": 1}
    targets: ClassVar[tuple[Target, ...]] = (Target("ratio", 0.95, "CPU time with the dashboard closed over open"),)
    modules: ClassVar[tuple[str, ...]] = ("foray/dashboard", "foray/watch", "benchmarks/dashboard.py")

    turns: int = Field(default=24, ge=2)
    """Windows, half of them with the page open."""
    steps: int = Field(default=8, ge=1)
    """Optimiser steps per window."""
    skip: int = Field(default=4, ge=1)
    """First steps that are not measured."""
    model: Path | None = None
    """Warm-started model of the demo. None: create one first, which takes a minute or two."""

    def measure(self, say: Say) -> BenchResult:
        """Run the ring once, and the client in half of the windows."""
        from deploy.launch.launcher import Launcher
        from foray.demo.run import DemoOptions, prepare

        with tempfile.TemporaryDirectory(prefix="foray-bench-") as folder:
            model = self.model or warm_model(Path(folder) / "model", say)
            sizes = (f"run.steps={self.skip + (self.turns + 1) * (self.steps + 2)}",)
            prepared = prepare(DemoOptions(Path(folder) / "run", 0, model=model, overrides=sizes), say)
            with Launcher(prepared.config, say=say) as launcher:
                launcher.start("redis", "retriever", "engine", "rollout", "learner")
                with _dashboard(prepared.config.run.dir) as (url, pid):
                    _await_step(launcher, self.skip)
                    rows = [self._window(launcher, url, pid, turn, say) for turn in range(self.turns)]
        return summary(rows)

    def _window(self, launcher: Launcher, url: str, dashboard: int, turn: int, say: Say) -> dict[str, Any]:
        from deploy.run.history import read_steps

        is_open = turn % 4 in (1, 2)
        first = _await_step(launcher, int(launcher.last_step["step"]) + 1)
        begun = _cpu(launcher, dashboard)
        stop = threading.Event()
        reader = threading.Thread(target=_read, args=(url, stop), daemon=True)
        if is_open:
            reader.start()
        last = _await_step(launcher, first + self.steps)
        ended = _cpu(launcher, dashboard)
        stop.set()
        if is_open:
            reader.join(30)
        records = read_steps(launcher.config.run.dir / "metrics.jsonl").values()
        tokens = sum(record["tokens_trained"] for record in records if first < record["step"] <= last)
        row = {"open": is_open, "tokens": tokens} | {name: ended[name] - begun[name] for name in ended}
        say(f"steps {first + 1} to {last}, page {'open' if is_open else 'closed'}: {row}")
        return row


def summary(rows: Sequence[Mapping[str, Any]]) -> BenchResult:
    """Return CPU seconds per 1,000 trained tokens, from the sums over the windows of each kind."""

    def cost(names: Sequence[str], is_open: bool) -> float:
        mine = [row for row in rows if row["open"] == is_open]
        seconds = float(sum(row[name] for row in mine for name in names))
        return 1000.0 * seconds / float(sum(row["tokens"] for row in mine))

    shown, closed = cost(OBSERVED, True), cost(OBSERVED, False)
    return BenchResult(
        value=shown,
        unit="CPU seconds of learner and rollout server per 1,000 trained tokens",
        baseline={"name": "the same ring with the dashboard closed", "value": closed},
        ratio=closed / shown,
        details={
            **{f"{name}_{'open' if o else 'closed'}": cost([name], o) for name in OBSERVED for o in (True, False)},
            "dashboard_open": cost(["dashboard"], True),
            "windows": [dict(row) for row in rows],
        },
    )


def _cpu(launcher: Launcher, dashboard: int) -> dict[str, float]:
    children = launcher.supervisor.children.values()
    by_kind = {kind: sum(cpu_seconds(c.pid) for c in children if c.spec.kind == kind) for kind in OBSERVED}
    return {**by_kind, "dashboard": cpu_seconds(dashboard)}


def _await_step(launcher: Launcher, step: int) -> int:
    while (done := int(launcher.last_step.get("step", 0))) < step:
        launcher.check()
        if launcher.supervisor.ended("learner"):
            raise ForayError(f"the run ended before step {step}")
        time.sleep(0.02)
    return done


@contextmanager
def _dashboard(directory: Path) -> Iterator[tuple[str, int]]:
    """Run `foray dashboard`; yields its URL and process id."""
    call = [sys.executable, "-m", "foray", "dashboard", str(directory), "--port", "0"]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        if found is None:
            raise ForayError("`foray dashboard` did not start")
        yield found[0], process.pid
    finally:
        process.kill()
        process.communicate()


def _read(url: str, stop: threading.Event) -> None:
    """Do what the page does: after events, wait a moment and read the page's data."""
    with urllib.request.urlopen(f"{url}/events", timeout=60) as events:
        while not stop.is_set() and (line := events.readline()):
            if not line.startswith(b"event:"):
                continue
            time.sleep(PAGE_S)
            for path in REQUESTS:
                with urllib.request.urlopen(url + path, timeout=60) as answer:
                    answer.read()
