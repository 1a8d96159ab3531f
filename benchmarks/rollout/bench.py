"""`foray bench rollout`: utilisation of a fleet of engines, against other routing policies.

Each engine is a separate process with finite capacity, its own speed and a prefix cache (`batching`). During each play
one engine is down for a while, and all are updated twice, one after another. The same trajectories are rolled out by
Foray, by the same server with other routing policies (`routing`), and by the turn-barrier loop of Search-R1, without
faults because it has no failover. Lengths and search times are a pure function of (seed, trajectory, turn).

Value: seconds of a clairvoyant schedule of the same play (`oracle`) over Foray's. Ratio: seconds of the best baseline
among random, round robin and least loaded, over Foray's.
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

from benchmarks.base import BenchResult, BenchSettings, Say, Target
from benchmarks.rollout.batching import Speed
from benchmarks.rollout.oracle import bound_s, oracle_s
from benchmarks.rollout.script import Draws, Faults, Script
from protocol.errors import ForayError

if TYPE_CHECKING:
    from benchmarks.rollout.ring import Played, RolloutRing

BASELINES = ("random", "round_robin", "least_loaded")
PEERS = (*BASELINES, "sticky")
OBSERVATION_TOKENS = 310
"""Of three passages of 100 words, with their tags."""


class RolloutBench(BenchSettings):
    """Settings of `foray bench rollout`."""

    help: ClassVar[str] = "multi-turn rollouts on uneven, failing engines against other routing and an oracle"
    quick: ClassVar[dict[str, Any]] = {"trajectories": 64, "scale": 0.1, "seeds": (0,), "slowness": (1.0, 2.0)}
    targets: ClassVar[tuple[Target, ...]] = (
        Target("value", 0.9, "share of what a clairvoyant schedule reaches"),
        Target("ratio", 1.1, "seconds of the best routing baseline over ours"),
    )
    modules: ClassVar[tuple[str, ...]] = ("protocol", "rollout_server", "benchmarks/rollout/*.py")

    trajectories: int = Field(default=512, ge=1)
    """Trajectories per play."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories per question."""
    turns: int = Field(default=4, ge=1, le=100)
    """Turns per trajectory; all but the last end in a search."""
    turn_tokens: int = Field(default=64, ge=16, le=200)
    """Median tokens per turn."""
    concurrency_groups: int = Field(default=64, ge=1)
    """Concurrent groups per rollout server. The default is all of a play, among which the oracle chooses, too."""
    slowness: tuple[float, ...] = Field(default=(1.0, 1.0, 1.5, 2.0), min_length=1)
    """Slowness of each engine, a factor on the time of its steps: 1,1,1.5,2."""
    scale: float = Field(default=0.5, gt=0)
    """Factor on all durations. A smaller one shortens the run and increases the weight of Foray's overhead."""
    seeds: tuple[int, ...] = Field(default=(0, 1), min_length=1)
    """Random seeds of lengths and search times, one repetition each: 0,1."""
    broken: bool = False
    """Route Foray's requests to a single engine, to check that the figure shows it."""

    @field_validator("seeds", "slowness", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> RolloutBench:
        if self.trajectories % self.group_size:
            raise ValueError(f"trajectories = {self.trajectories} is not a multiple of group_size = {self.group_size}")
        if min(self.seeds) < 0:
            raise ValueError("seeds must not be negative")
        if min(self.slowness) <= 0:
            raise ValueError("slowness must be above 0")
        return self

    def measure(self, say: Say) -> BenchResult:
        """Run Foray, then each baseline, per seed. Raises ForayError if a trajectory did not finish."""
        from benchmarks.rollout.ring import running
        from tests.support.environments import write_tokenizer

        draws = Draws(self.trajectories, self.turns, self.turn_tokens, self.scale)
        speeds = tuple(Speed(slowness=slowness * self.scale) for slowness in self.slowness)
        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            directory = Path(name)
            script = Script(directory, draws, self.group_size, speeds, self.seeds)
            write_tokenizer(directory, "words", more_words=script.words)
            (directory / "config.json").write_text(json.dumps({"vocab_size": len(script.ids)}))
            (directory / "claims").mkdir()
            with running(directory, script, groups=self.concurrency_groups, say=say) as ring:
                rows = [row for seed in self.seeds for row in self._seed(ring, script, seed, say)]
        return _summary(rows)

    def faults(self, script: Script, seed: int) -> Faults:
        """Return the faults: the last of the fastest engines is down in the first half; updates at 1/6 and 6/10."""
        fastest = max(i for i, slowness in enumerate(self.slowness) if slowness == min(self.slowness))
        whole = bound_s(script.draws, seed, script.speeds, OBSERVATION_TOKENS)
        alone = len(self.slowness) == 1
        return Faults(
            down=-1 if alone else fastest,
            down_s=0.3 * whole,
            away_s=0.2 * whole,
            swaps_s=(0.15 * whole, 0.6 * whole),
            pause_s=0.5 * self.scale,
        )

    def _seed(self, ring: RolloutRing, script: Script, seed: int, say: Say) -> list[dict[str, Any]]:
        """Run every policy on one seed and return the rows."""
        from benchmarks.rollout.routing import BROKEN, OURS

        faults = self.faults(script, seed)
        bound = bound_s(script.draws, seed, script.speeds, OBSERVATION_TOKENS, faults)
        oracle = oracle_s(script.draws, seed, script.speeds, OBSERVATION_TOKENS, faults)
        say(f"seed {seed}: no schedule takes less than {bound:.1f} s, the oracle's takes {oracle:.1f} s")
        rows = []
        for policy in (BROKEN if self.broken else OURS, *PEERS):
            played = ring.play(script, seed, policy, faults, timeout_s=10 * oracle + 60)
            check(played, script)
            rows.append(self._row(seed, OURS if policy == BROKEN else policy, bound, oracle, played))
            say(f"seed {seed}: {policy} took {played.seconds:.1f} s")
        barrier = _barrier(ring, script, seed, timeout_s=10 * oracle + 60)
        say(f"seed {seed}: the turn-barrier loop took {barrier['seconds']:.1f} s, without faults")
        cpu = 1000 * barrier["cpu_s"] / (self.trajectories * self.turns)
        rows.append(_figures(seed, "turn_barrier", bound, oracle, barrier["seconds"]) | {"cpu_ms_per_turn": cpu})
        return rows

    def _row(self, seed: int, policy: str, bound: float, oracle: float, played: Played) -> dict[str, Any]:
        trajectories = [t for group in played.groups for t in group.trajectories]
        return _figures(seed, policy, bound, oracle, played.seconds) | {
            "tail_s": played.tail_s,
            "cpu_ms_per_turn": 1000 * played.cpu_s / (self.trajectories * self.turns),
            "event_loop_lag_s": played.loop_lag_s,
            "failovers": played.failovers,
            "engines_a_trajectory": fmean(len({s.engine for s in t.segments if s.engine}) for t in trajectories),
        }


def _figures(seed: int, policy: str, bound: float, oracle: float, seconds: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "policy": policy,
        "seconds": seconds,
        "oracle_s": oracle,
        "bound_s": bound,
        "of_oracle": oracle / seconds,
    }


def check(played: Played, script: Script) -> None:
    """Raise ForayError unless every trajectory ran exactly once, to its answer, with all its turns."""
    from protocol.messages import Status

    every = [trajectory for group in played.groups for trajectory in group.trajectories]
    answers = sorted(int(trajectory.answer or -1) for trajectory in every)
    if answers != list(range(script.draws.trajectories)):
        expected = script.draws.trajectories
        raise ForayError(f"{len(answers)} trajectories with {len(set(answers))} different answers, expected {expected}")
    for trajectory in every:
        turns = (trajectory.status, trajectory.turns, trajectory.searches)
        if turns != (Status.ANSWERED, script.draws.turns, script.draws.turns - 1):
            raise ForayError(f"a trajectory ended {turns[0]} after {turns[1]} turns and {turns[2]} searches")


def _barrier(ring: RolloutRing, script: Script, seed: int, *, timeout_s: float) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks.rollout.barrier", str(script.directory / "script.json")]
    argv += [str(seed), str(ring.next_play()), ring.search, *ring.engines]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise ForayError(f"the barrier loop failed: {done.stderr.strip()[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _summary(rows: list[dict[str, Any]]) -> BenchResult:
    """Return means over the seeds per policy, and every play."""
    from benchmarks.rollout.routing import OURS

    def mean(policy: str, name: str) -> float:
        return fmean(row[name] for row in rows if row["policy"] == policy)

    best = min(BASELINES, key=lambda policy: mean(policy, "seconds"))
    policies = [OURS, *PEERS, "turn_barrier"]
    return BenchResult(
        value=mean(OURS, "of_oracle"),
        unit="oracle's seconds / seconds",
        baseline={"name": f"{best} routing", "seconds": mean(best, "seconds"), "of_oracle": mean(best, "of_oracle")},
        ratio=mean(best, "seconds") / mean(OURS, "seconds"),
        details={
            "seconds": mean(OURS, "seconds"),
            "oracle_s": mean(OURS, "oracle_s"),
            "bound_s": mean(OURS, "bound_s"),
            "tail_s": mean(OURS, "tail_s"),
            "lowest_of_oracle": min(row["of_oracle"] for row in rows if row["policy"] == OURS),
            "cpu_ms_per_turn": mean(OURS, "cpu_ms_per_turn"),
            "event_loop_lag_s": max(row["event_loop_lag_s"] for row in rows if row["policy"] == OURS),
            "ours_against": {p: mean(p, "seconds") / mean(OURS, "seconds") for p in policies[1:]},
            "by_play": rows,
        },
    )
