"""`foray bench rollout`: does anybody wait for anybody? The real rollout server against the turn-barrier loop.

Both roll out the same trajectories against the same engines and the same search, which are processes of their own
that take lognormal times; each time is a pure function of (seed, trajectory, turn). Value: efficiency, the critical
path (the longest trajectory's own latencies, which no scheduler can beat) over our seconds. Ratio: seconds of the
barrier loop over ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from deploy.bench.base import BenchSettings, Measured, Say, Target
from deploy.bench.draws import Draws
from deploy.bench.script import Script
from protocol.errors import ForayError
from protocol.messages import Status

if TYPE_CHECKING:
    from deploy.bench.ring import Played, Ring


class RolloutBench(BenchSettings):
    """Sizes and latencies."""

    help: ClassVar[str] = "multi-turn rollouts against a loop that waits for the slowest in every turn"
    quick: ClassVar[dict[str, Any]] = {"trajectories": 32, "scale": 0.05, "seeds": (0,), "engines": 2}
    targets: ClassVar[tuple[Target, ...]] = (Target("value", 0.95, "efficiency: critical path over seconds"),)
    modules: ClassVar[tuple[str, ...]] = (
        "protocol",
        "rollout_server",
        "deploy/bench/rollout*.py",
        "deploy/bench/ring.py",
        "deploy/bench/barrier.py",
        "deploy/bench/draws.py",
        "deploy/bench/script.py",
        "deploy/bench/latency*.py",
    )

    trajectories: int = Field(default=512, ge=1)
    """Trajectories at once."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories of one question."""
    turns: int = Field(default=4, ge=1, le=100)
    """Turns of each: all but the last search."""
    turn_tokens: int = Field(default=64, ge=16, le=400)
    """Tokens of a turn."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on every latency; less is quicker and shows more of our own cost."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    """Seeds of the latencies, one repetition each: 0,1,2."""
    engines: int = Field(default=4, ge=1)
    """Engine processes."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _whole_groups(self) -> RolloutBench:
        if self.trajectories % self.group_size:
            raise ValueError(f"{self.trajectories} trajectories are no whole groups of {self.group_size}")
        if min(self.seeds) < 0:
            raise ValueError("a seed is negative")
        return self

    def measure(self, say: Say) -> Measured:
        """Seed after seed: ours, then the barrier loop. Raises ForayError when a trajectory did not go to its end."""
        from deploy.bench.ring import running
        from rollout_server.testing import write_tokenizer

        draws = Draws(self.trajectories, self.turns, self.scale)
        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            directory = Path(name)
            script = Script(directory, draws, self.group_size, self.turn_tokens, self.seeds)
            write_tokenizer(directory, "words", more_words=script.words)
            (directory / "config.json").write_text(json.dumps({"vocab_size": len(script.ids)}))
            (directory / "claims").mkdir()
            groups = self.trajectories // self.group_size
            with running(directory, script, engines=self.engines, groups=groups, say=say) as ring:
                rows = [self._seed(ring, script, seed, 2 * i, say) for i, seed in enumerate(self.seeds)]
        return _summary(rows)

    def _seed(self, ring: Ring, script: Script, seed: int, number: int, say: Say) -> dict[str, float]:
        """Both loops on one seed's latencies. `number`, `number + 1`: names of the two plays."""
        draws, turns = script.draws, self.trajectories * self.turns
        bound, barrier_bound = draws.bound_s(seed), draws.barrier_bound_s(seed)
        say(f"seed {seed}: ours, at least {bound:.1f} s")
        played = ring.play(script, seed, number, timeout_s=3 * bound + 60)
        check(played, script)
        say(f"seed {seed}: ours took {played.seconds:.1f} s; the barrier loop, at least {barrier_bound:.1f} s")
        barrier = _barrier(ring, script, seed, number + 1, timeout_s=3 * barrier_bound + 60)
        say(f"seed {seed}: the barrier loop took {barrier['seconds']:.1f} s")
        return {
            "seed": seed,
            "bound_s": bound,
            "seconds": played.seconds,
            "efficiency": bound / played.seconds,
            "cpu_ms_per_turn": 1000 * played.cpu_s / turns,
            "world_cpu_s": played.world_cpu_s,
            "event_loop_lag_s": played.loop_lag_s,
            "barrier_bound_s": barrier_bound,
            "barrier_seconds": barrier["seconds"],
            "barrier_efficiency": bound / barrier["seconds"],
            "barrier_cpu_ms_per_turn": 1000 * barrier["cpu_s"] / turns,
            "ratio": barrier["seconds"] / played.seconds,
        }


def check(played: Played, script: Script) -> None:
    """Every trajectory exactly once, to its answer, with all its turns; raises ForayError otherwise."""
    every = [trajectory for group in played.groups for trajectory in group.trajectories]
    answers = sorted(int(trajectory.answer or -1) for trajectory in every)
    if answers != list(range(script.draws.trajectories)):
        raise ForayError(f"{len(set(answers))} of {script.draws.trajectories} trajectories answered, the rest did not")
    for trajectory in every:
        turns = (trajectory.status, trajectory.turns, trajectory.searches)
        if turns != (Status.ANSWERED, script.draws.turns, script.draws.turns - 1):
            raise ForayError(f"a trajectory ended {turns[0]} after {turns[1]} turns and {turns[2]} searches")


def _barrier(ring: Ring, script: Script, seed: int, number: int, *, timeout_s: float) -> dict[str, float]:
    argv = [sys.executable, "-m", "deploy.bench.barrier", str(script.directory / "script.json")]
    argv += [str(seed), str(number), ring.search, *ring.engines]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise ForayError(f"the barrier loop failed: {done.stderr.strip()[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _summary(rows: list[dict[str, float]]) -> Measured:
    """Means over the seeds, and every seed by itself."""

    def mean(name: str) -> float:
        return fmean(row[name] for row in rows)

    return Measured(
        value=mean("efficiency"),
        unit="critical path / seconds",
        baseline={
            "name": "turn-barrier loop (Search-R1)",
            "seconds": mean("barrier_seconds"),
            "efficiency": mean("barrier_efficiency"),
            "cpu_ms_per_turn": mean("barrier_cpu_ms_per_turn"),
        },
        ratio=mean("barrier_seconds") / mean("seconds"),
        details={
            "seconds": mean("seconds"),
            "bound_s": mean("bound_s"),
            "lowest_efficiency": min(row["efficiency"] for row in rows),
            "cpu_ms_per_turn": mean("cpu_ms_per_turn"),
            "event_loop_lag_s": max(row["event_loop_lag_s"] for row in rows),
            "by_seed": rows,
        },
    )
