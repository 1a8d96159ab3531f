"""`foray bench rollout_scale`: how long the rollout server's event loop stands still, and what a turn costs it.

The router with its real client, stop search and HTTP connections is in a separate process, simulated engines are in
others and stream over loopback sockets (`scale_engines`).

1. An engine dies under 64 turns of 2,000 tokens, and another one continues them to their stop string. Measured from the
   death to the end of the last turn: the longest time that the event loop stood still. Baseline: the same run without a
   death.
2. Steady state: 4,096 trajectories at 256 engines, and at 8. Each turn waits for its engine most of the time. A new
   engine table is decoded and installed twice a second. CPU time of the process a turn, and the longest standstill.

Standstills are stated in seconds and in CPU seconds of the loop's thread: the latter do not count the time that other
processes of a busy machine had the core.

Value: seconds of the longest standstill at a death, median of the rounds. Ratio: without a death over with one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from pydantic import Field, field_validator

from benchmarks.base import BenchResult, BenchSettings, Say, Target
from protocol.errors import ForayError
from protocol.runtime.net import free_port, is_free

ALLOWED_S = 0.2
"""Longest standstill at the death of an engine that the target allows."""
PROMPT = 64
REST = 160
"""Tokens that the second engine generates."""


class RolloutScaleBench(BenchSettings):
    """Settings of `foray bench rollout_scale`."""

    help: ClassVar[str] = "the rollout server's event loop when an engine dies, and a turn's CPU time at many engines"
    quick: ClassVar[dict[str, Any]] = {
        **{"turns": 8, "tokens": 200, "rounds": 1},
        **{"trajectories": 64, "engines": (2, 16), "turn_s": 1.0, "seconds": 2.0},
    }
    targets: ClassVar[tuple[Target, ...]] = (
        Target("allowed_over_gap", 1.0, f"{ALLOWED_S:g} s over the longest standstill of the loop at a death"),
        Target("steady_cpu_ratio", 0.5, "CPU time of a turn at the fewest engines over that at the most"),
    )
    modules: ClassVar[tuple[str, ...]] = ("protocol", "rollout_server", "benchmarks/rollout/scale*.py")

    turns: int = Field(default=64, ge=1)
    """Turns at the engine that dies."""
    tokens: int = Field(default=2000, ge=8)
    """Tokens of each at its death."""
    pace_s: float = Field(default=0.005, gt=0)
    """Seconds between two tokens."""
    rounds: int = Field(default=3, ge=1)
    """Runs with, and without a death."""
    trajectories: int = Field(default=4096, ge=1)
    """Concurrent trajectories in the steady state."""
    engines: tuple[int, ...] = Field(default=(8, 256), min_length=2)
    """Numbers of engines in the steady state, ascending: 8,256."""
    turn_s: float = Field(default=30.0, gt=0)
    """Seconds that an engine needs for a turn of 64 tokens in the steady state."""
    seconds: float = Field(default=30.0, gt=0)
    """Length of the steady state that is measured."""

    @field_validator("engines", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    def measure(self, say: Say) -> BenchResult:
        """Run the deaths, then the steady states. Raises ForayError if a turn has other tokens than expected."""
        from rollout_server.environment.tokenizer import load_tokenizer
        from tests.support.environments import write_tokenizer

        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            folder = Path(name)
            tokenizer = load_tokenizer(write_tokenizer(folder, "bytes"))
            stop = tokenizer.encode_trusted("</search>")
            thought = tokenizer.encode_trusted("The film was made in 1984 > its author </ is not known. " * self.tokens)
            ids = [*thought[: self.tokens + REST - len(stop)], *stop]
            deaths, lives = list[dict[str, float]](), list[dict[str, float]]()
            for number in range(self.rounds):
                for rows, dies in ((lives, False), (deaths, True)):
                    rows.append(self._death(folder, ids, dies))
                    say(f"round {number}: {'death' if dies else 'no death'}: {rows[-1]}")
            steady = {}
            for engines in self.engines:
                steady[str(engines)] = self._steady(folder, ids, engines)
                say(f"{engines} engines: {steady[str(engines)]}")
        gap, quiet = (median(row["gap_s"] for row in rows) for rows in (deaths, lives))
        few, many = (steady[str(n)]["cpu_ms_per_turn"] for n in (self.engines[0], self.engines[-1]))
        return BenchResult(
            value=gap,
            unit="s",
            baseline={"name": "no death", "gap_s": quiet, "gap_cpu_s": median(row["gap_cpu_s"] for row in lives)},
            ratio=quiet / gap,
            details={
                "allowed_over_gap": ALLOWED_S / gap,
                "gap_cpu_s": median(row["gap_cpu_s"] for row in deaths),
                "longest_gap_s": max(row["gap_s"] for row in deaths),
                "steady": steady,
                "steady_cpu_ratio": few / many,
                "deaths": deaths,
                "without": lives,
            },
        )

    def _death(self, folder: Path, ids: Sequence[int], dies: bool) -> dict[str, float]:
        hold = {"hold": self.tokens + REST // 2} if dies else {}
        both = {"pace_s": self.pace_s, "prompt": PROMPT}
        with _engines(folder, ids, **both, **hold) as first, _engines(folder, ids, **both) as second:
            spec = {"first": first[0], "second": second[0], "pid": first[1] if dies else 0}
            return _router("death", folder, spec | {"turns": self.turns, "tokens": self.tokens, "prompt": PROMPT})

    def _steady(self, folder: Path, ids: Sequence[int], engines: int) -> dict[str, float]:
        with _engines(folder, ids, pace_s=self.turn_s / 64, prompt=None) as (url, _):
            spec = {"url": url, "engines": engines, "trajectories": self.trajectories}
            return _router("steady", folder, spec | {"turn_s": self.turn_s, "seconds": self.seconds})


@contextmanager
def _engines(folder: Path, ids: Sequence[int], **facts: Any) -> Iterator[tuple[str, int]]:
    """Run the process of `scale_engines`; yields its URL and process id."""
    port = free_port()
    spec = folder / f"engines-{port}.json"
    spec.write_text(json.dumps({"ids": list(ids), **facts}))
    argv = [sys.executable, "-m", "benchmarks.rollout.scale_engines", str(spec), str(port)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=os.environ.copy()) as process:
        try:
            deadline = time.monotonic() + 180
            while is_free("127.0.0.1", port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ForayError("the simulated engines did not start")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.kill()


def _router(kind: str, folder: Path, spec: dict[str, Any]) -> dict[str, float]:
    """Run the process of `scale_router`; returns its figures. Raises ForayError if it fails."""
    argv = [sys.executable, "-m", "benchmarks.rollout.scale_router", kind, str(folder), json.dumps(spec)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise ForayError(f"the router failed: {done.stderr.strip()[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures
