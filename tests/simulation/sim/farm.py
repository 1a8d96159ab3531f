"""A run whose engines are counted: places in which trajectories sleep, and a learner whose steps sleep.

The learner, its metrics and its vote, and the rollout servers' leases and metrics are the product's code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sim.clock import Stuck
from sim.engine import SimBatch, SimEngine, SimReport
from sim.knobs import Knobs
from sim.processes import Learner, Rollouts
from sim.world import World

from deploy.launch.scale import followed
from protocol.codec import decode_as, encode
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, Task
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet

PLACES, TRAJECTORY_S, JOIN_S = 4, 20.0, 30.0
GROUPS, MOST = 8, 6
LOOK_S = 10.0
LEARNERS: dict[str, Callable[[float], float]] = {
    "slow": lambda done: 60.0,
    "fast": lambda done: 16.0,
    "changing": lambda done: 60.0 if int(done * 4) % 2 == 0 else 20.0,
}
"""Seconds of a training step by the share of the run that is done. One engine generates a batch in 80 s."""


@dataclass
class Engine:
    """An engine of `PLACES` places."""

    id: str
    since: float
    state: NodeState = NodeState.JOINING
    running: int = 0


@dataclass
class Played:
    """One run. trace: (virtual second, engines, wanted)"""

    learner: str
    fixed: int
    seconds: float = 0.0
    steps: int = 0
    engine_hours: float = 0.0
    waiting: float = 0.0
    trace: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def steps_per_hour(self) -> float:
        return 3600 * self.steps / self.seconds

    @property
    def reversals(self) -> list[float]:
        """Moments at which the direction of the changes turned."""
        moves = [(at, after - before) for (_, before, _), (at, after, _) in pairwise(self.trace)]
        turns = [(at, change) for at, change in moves if change]
        return [at for (_, a), (at, b) in pairwise(turns) if a * b < 0]


class PacedEngine(SimEngine):
    """A learner's engine whose steps take what the run's progress says, within 10 %."""

    seconds: Callable[[float], float]
    of: int

    def train(self, batch: SimBatch) -> SimReport:
        pace = self.seconds(len(self.history) / self.of)
        self._step_s = (pace * 0.9, pace * 1.1)
        return super().train(batch)


class Reporting(Rollouts):
    """A rollout server that publishes its metrics."""

    concurrency, reports = 4 * GROUPS, True


class Farm(World):
    """A run without faults, whose engines are counted."""

    def __init__(self, learner: str, fixed: int, seed: int, steps: int) -> None:
        knobs = Knobs(steps=steps, groups_per_step=GROUPS, max_lag=1, checkpoint_every=20, storm_s=1e6)
        knobs.lease_s, knobs.reconcile_s, knobs.idle_s = 60.0, 600.0, 60.0
        super().__init__(seed, knobs)
        self.clock.most_moves = 10**9
        self.played = Played(learner, fixed, steps=steps)
        self._pace, self._engines, self._number = LEARNERS[learner], list[Engine](), 0
        self._freed = asyncio.Event()
        self._begun = 0.0
        for _ in range(fixed or 1):
            self._join(0.0)

    def start_learner(self, *, takeover: bool = False) -> None:
        learner = Learner(self.clock, self._name("L"))
        self.learners.append(learner)

        def make() -> SimEngine:
            engine = PacedEngine(self.clock, (1.0, 1.0), lambda: "")
            engine.seconds, engine.of = self._pace, self.knobs.steps * GROUPS
            return engine

        learner.start(self.run, self.settings, make, takeover=takeover)

    def start_server(self) -> None:
        self.servers.append(Reporting(self.clock, self._name("R"), self.run, self._roll, int(self.knobs.idle_s * 1000)))

    # --- engines ---

    def _join(self, after: float) -> None:
        self._number += 1
        engine = Engine(f"engine-{self._number}", self.clock.now)
        self._engines.append(engine)
        self.clock.at(self.clock.now + after, lambda: self._ready(engine))

    def _ready(self, engine: Engine) -> None:
        if engine.state is NodeState.JOINING:
            engine.state = NodeState.READY
            self._wake()

    def _wake(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

    def _usable(self) -> list[Engine]:
        return [e for e in self._engines if e.state is NodeState.READY]

    async def _roll(self, task: Task, fleet: Fleet) -> Any:
        version = fleet.table.target or PolicyVersion(0, 0)
        (server,) = [s for s in self.servers if s is self.clock.current]
        await asyncio.gather(*(self._trajectory(server) for _ in range(task.group_size)))
        return self._group(task, version, self.run.id)

    async def _trajectory(self, server: Rollouts) -> None:
        assert server.stats is not None
        while not (free := [e for e in self._usable() if e.running < PLACES]):
            with server.stats.waits.blocked_on("window"):
                await asyncio.sleep(0.5)
        engine = min(free, key=lambda e: e.running)
        engine.running += 1
        seconds = TRAJECTORY_S * self.rng.uniform(0.5, 1.5)
        await asyncio.sleep(seconds)
        engine.running -= 1
        server.stats.counts["engine_ms"] += round(1000 * seconds)

    # --- what is beside the run: registrations, and who follows the number ---

    def beat(self) -> None:
        """The nodes' heartbeats, once a second."""
        now, keys = self.clock.now, self.keys
        self._engines = [e for e in self._engines if e.state is not NodeState.DRAINING or e.running]
        self.redis.delete(keys.engines)
        for e in self._engines:
            info = EngineInfo(
                id=e.id, url="http://e", state=e.state, epoch=1, max_running=PLACES, running=e.running, kind="cpu"
            )
            self.redis.zadd(keys.engines, {e.id: self.redis.now_ms() / 1000 + 10})
            self.redis.hset(keys.engine(e.id), "b", encode(info))
        seen = self._learner()
        if self._begun or (seen is not None and seen.values.get("step")):
            self._begun = self._begun or now
            self.played.engine_hours += len(self._engines) / 3600
        if not self.finished:
            self.clock.at(now + 1.0, self.beat)

    def _learner(self) -> MetricsSnapshot | None:
        raw = self.redis.get(self.keys.metrics("learner", "0"))
        return decode_as(MetricsSnapshot, raw) if raw else None

    def follow(self) -> None:
        """What a launcher does: start engines, or let the last ones drain."""
        seen = self._learner()
        going = [e for e in self._engines if e.state is not NodeState.DRAINING]
        reported = seen.values.get("wanted_engines", 0.0) if seen else 0.0
        wanted = self.played.fixed or followed(None, reported, least=1, most=MOST) or len(going)
        self.played.trace.append((self.clock.now - self._begun, len(going), int(reported)))
        for _ in range(len(going), wanted):
            self._join(JOIN_S)
        for engine in going[wanted:]:
            engine.state = NodeState.DRAINING
        if seen is not None:
            data = seen.waits.get("data", 0.0)
            self.played.waiting = data / max(1.0, seen.uptime_s)
        if not self.finished:
            self.clock.at(self.clock.now + LOOK_S, self.follow)


def play(learner: str, fixed: int, seed: int, steps: int) -> Played:
    """One run; fixed 0: the autoscaler's number, from one engine on."""
    from sim.install import installed

    with installed():
        farm = Farm(learner, fixed, seed, steps)
        farm.clock.at(0.0, farm.beat)
        farm.clock.at(0.1, farm.follow)
        result = farm.play()
        if result.problem:
            raise Stuck(result.problem)
        farm.played.seconds = farm.clock.now - farm._begun
    return farm.played
