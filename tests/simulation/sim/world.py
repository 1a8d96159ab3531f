"""One schedule: two rollout servers, a learner that is restarted, sometimes a second one, one Redis, and a storm.

The storm lasts `storm_s`; then nothing fails any more, and the run must finish without breaking an invariant.
The same seed gives the same schedule, move by move.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sim import install
from sim.clock import Clock, Killed, Process, Stuck
from sim.engine import SimEngine, SimPublish
from sim.invariants import Invariants
from sim.knobs import Knobs, draw
from sim.network import AsyncClient, Network, SyncClient
from sim.processes import URL, Learner, Rollouts
from sim.sim_redis import SimRedis
from sim.storm import Storm

from learner.config.learner import FilterSettings, LearnerSettings
from protocol.codec import decode_as
from protocol.header import seal
from protocol.keys import Keys
from protocol.messages import Task, Trajectory, TrajectoryGroup
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet
from rollout_server.rollout.group import GroupRejected
from tests.support.messages import make_question, make_trajectory

PATIENCE_S = 300.0
"""Virtual seconds after the storm in which the run must end."""
EXPECTED = ("is held by", "cannot reach Redis", "could not be written", "were not trained")
"""Refusals that may end a learner; the supervisor restarts it."""
MOVES_PER_S = 60
"""More moves, for each second of a long absence of Redis."""
SMALL_KEYS, TASK, GROUP = 3000, 200, 2000
"""Bytes, a little more than they are here."""
WAITABLE = ("RedisUnavailable", "StateLost")


@dataclass
class Result:
    """The result of a schedule. problem: "" if every invariant held and the run finished."""

    seed: int
    problem: str
    moves: int
    virtual_s: float
    faults: Counter[str]
    checks: Counter[str]
    endings: Counter[str]
    lines: list[str]
    refused: Counter[str]
    """Process -> commands that found Redis away."""


@lru_cache(maxsize=512)
def _trajectory(reward: float, version: PolicyVersion) -> Trajectory:
    return make_trajectory(reward, version=version)


def _bytes(knobs: Knobs) -> int:
    """Return the memory limit for this many groups, the tasks in flight and the small keys of a run."""
    window = (knobs.max_lag + 1) * knobs.groups_per_step
    return knobs.memory and SMALL_KEYS + 4 * window * TASK + knobs.memory * GROUP


class World:
    """Everything of one schedule."""

    def __init__(self, seed: int, knobs: Knobs | None = None) -> None:
        self.seed, self.knobs = seed, knobs or draw(seed)
        self.clock = Clock(seed)
        self.clock.most_moves += int(self.knobs.away_s * MOVES_PER_S)
        self.rng = random.Random(f"world {seed}")
        self.redis_ahead = 0.0
        self.redis = SimRedis(lambda: 1.6e12 + (self.clock.now + self.redis_ahead) * 1000)
        self.redis.limit = _bytes(self.knobs)
        self.network = Network(self.clock, self.redis, self.knobs.trouble)
        self.folder = Path(tempfile.mkdtemp(prefix="foray-sim-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.run = RunSettings(
            id="sim",
            dir=self.folder,
            redis_url=URL,
            group_size=2,
            groups_per_step=self.knobs.groups_per_step,
            max_lag=self.knobs.max_lag,
            steps=self.knobs.steps,
        )
        self.keys = Keys(self.run.id)
        self.settings = LearnerSettings(
            metrics_port=None,  # a real server would wait for real clients, which never ends in virtual time
            checkpoint_every=self.knobs.checkpoint_every,
            lease_s=self.knobs.lease_s,
            reconcile_s=self.knobs.reconcile_s,
            on_stale=self.knobs.on_stale,  # type: ignore[arg-type]
            journal=False,
            filter=FilterSettings(metric="reward" if self.knobs.filter else ""),
        ).model_copy(update={"publish": SimPublish()})
        self.invariants = Invariants(self.clock, self.redis, self.run)
        self.faults: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.learners: list[Learner] = []
        self.servers: list[Rollouts] = []
        self.dies_at_disk = 0
        self.storming, self.finished = True, False
        self._restarting = False
        self._names = 0

    # --- what replaced parts ask for ---

    def sync_client(self, timeout_s: float) -> SyncClient:
        assert self.clock.current is not None
        return SyncClient(self.network, self.clock.current, timeout_s)

    def async_client(self) -> AsyncClient:
        assert self.clock.current is not None
        return AsyncClient(self.network, self.clock.current)

    def disk(self, path: Path) -> None:
        """A point at which the learner may die, the disk be full, or another mover run."""
        process, clock = self.clock.current, self.clock
        assert process is not None
        if self.dies_at_disk:
            self.dies_at_disk -= 1
            if not self.dies_at_disk:
                clock.tell(f"dies at {path.name}")
                process.alive = False
                clock.at(clock.now, lambda: clock.kill(process))
                raise Killed
        if self.storming and self.rng.random() < self.knobs.disk:
            self.faults["disk full"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        clock.wait(clock.now + (self.rng.uniform(0, 0.02) if self.rng.random() < 0.9 else self.rng.uniform(0, 3.0)))

    def committed(self, process: Process, folder: Path) -> None:
        self.invariants.committed(process, folder)

    def reissues(self, again: list[int]) -> None:
        self.invariants.reissues(again)

    def is_dead(self, token: str) -> bool:
        """Whether the holder of the lease is known to have ended: only on its own host."""
        owner = self.invariants.owners.get(token.encode())
        return self.knobs.same_host and owner is not None and not owner.alive

    def seal(self, message: Any) -> tuple[bytes, bytes]:
        """protocol.header.seal, and sometimes a flipped bit on the way."""
        header, body = seal(message)
        if self.storming and self.rng.random() < self.knobs.corrupt:
            self.faults["bit flipped"] += 1
            place = self.rng.randrange(len(body))
            body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        return header, body

    def sealed(self, seq: int, run: str) -> tuple[bytes, bytes]:
        """Return a valid group of another run."""
        return seal(
            self._group(Task(seq=seq, attempt=1, question=make_question(1), group_size=2), PolicyVersion(1, 0), run)
        )

    # --- processes ---

    def _clocks(self) -> dict[str, float]:
        return {"monotonic": self.rng.uniform(0, 1e5), "wall": self.rng.uniform(-3600, 3600)}

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def live_learners(self) -> list[Learner]:
        return [p for p in self.learners if p.alive and not p.outcome]

    def start_learner(self, *, takeover: bool = False) -> None:
        learner = Learner(self.clock, self._name("L"), **self._clocks())
        self.learners.append(learner)
        pace = (self.knobs.step_s * 0.5, self.knobs.step_s * 1.5)
        learner.start(self.run, self.settings, lambda: SimEngine(self.clock, pace, self._verdict), takeover=takeover)
        self.clock.tell(f"{learner} starts{' and takes over' if takeover else ''}")

    def _verdict(self) -> str:
        if self.storming and self.rng.random() < self.knobs.nonfinite:
            self.faults["step not finite"] += 1
            return "the loss is not finite"
        return ""

    def start_server(self) -> None:
        idle_ms = int(self.knobs.idle_s * 1000)
        self.servers.append(Rollouts(self.clock, self._name("R"), self.run, self._roll, idle_ms, **self._clocks()))

    def kill_server(self, server: Rollouts) -> None:
        """Kill like SIGKILL: later actions have no effect."""
        server.alive = False
        self.servers.remove(server)
        self.clock.movers.remove(server.loop)
        server.loop.shut()

    def _group(self, task: Task, version: PolicyVersion, run: str) -> TrajectoryGroup:
        same = self.rng.random() < self.knobs.same_reward
        rewards = (1.0, 1.0) if same else (1.0, 0.0)
        return TrajectoryGroup(
            run=run,
            seq=task.seq,
            attempt=task.attempt,
            question=task.question,
            trajectories=tuple(_trajectory(reward, version) for reward in rewards),
            producer="sim",
            template="search_r1",
        )

    async def _roll(self, task: Task, fleet: Fleet) -> TrajectoryGroup | GroupRejected:
        """Rolls a group out, in time drawn by the seed."""
        knobs, rng = self.knobs, self.rng
        version = fleet.table.target or PolicyVersion(0, 0)
        slow = self.storming and rng.random() < knobs.straggler
        await asyncio.sleep(rng.uniform(4.0, 15.0) if slow else rng.expovariate(1 / knobs.rollout_s))
        if self.storming and rng.random() < knobs.broken:
            self.faults["rollout broke"] += 1
            raise RuntimeError("a bug with one question")
        if self.storming and rng.random() < knobs.reject:
            self.faults["group rejected"] += 1
            return GroupRejected("no_engine", "", 4)
        return self._group(task, version, self.run.id)

    # --- the schedule ---

    def tend(self) -> None:
        """Restart ended processes, like a supervisor, until the run is done."""
        for learner in [p for p in self.learners if p.outcome or not p.alive]:
            self.learners.remove(learner)
            self._judge(learner)
        for server in list(self.servers):
            if problem := server.problem():
                self.clock.violated(f"rollout server {server} broke: {problem}")
            if server.ended:
                self.kill_server(server)
        if self.finished:
            return
        while len(self.servers) < 2:
            self.start_server()
        if not self.learners and not self._restarting:
            self._restarting = True
            self.clock.at(self.clock.now + self.rng.uniform(0.1, 1.5), self._restart)
        self.clock.at(self.clock.now + 0.5, self.tend)

    def _restart(self) -> None:
        self._restarting = False
        if not self.learners and not self.finished:
            self.start_learner()

    def _judge(self, learner: Learner) -> None:
        how = learner.outcome or "killed"
        kind = how.split(":")[0]
        if kind == "failed":
            kind = ": ".join(how.split(": ")[:2])
        self.endings[kind] += 1
        self.clock.tell(f"{learner} has ended: {how}")
        if how == "done":
            self.finished = True
            self.invariants.ended()
        elif kind == "refused" and not any(text in how for text in EXPECTED):
            self.clock.violated(f"learner {learner} refused to go on: {how}")
        elif kind.startswith("failed") and not any(word in kind for word in WAITABLE):
            self.clock.violated(f"learner {learner} {how}")
        elif not self.storming and kind.startswith("failed"):
            self.clock.violated(f"learner {learner} {how}, and nothing failed any more")

    def _calm(self) -> None:
        """The storm is over."""
        self.storming = False
        self.redis.made_full = False
        self.dies_at_disk = 0
        trouble = self.network.trouble
        trouble.lost_request = trouble.lost_reply = trouble.late = trouble.slow = 0.0
        self.network.cut_until.clear()
        self.clock.tell("the storm is over")

    def play(self) -> Result:
        """Run the schedule. Raises only for bugs of the simulation."""
        install.world = self
        for module in (install.TIME, install.THREADING, install.RANDOM):
            module.clock = self.clock
        storm = Storm(self)
        problem = ""
        try:
            self.tend()
            storm.brew()
            self.clock.at(self.knobs.storm_s, self._calm)
            deadline = self.knobs.storm_s + PATIENCE_S
            if not self.clock.run(lambda: self.finished, deadline):
                problem = f"the run did not end within {PATIENCE_S:.0f} s after the storm: {self._state()}"
        except (AssertionError, Stuck) as error:
            problem = str(error) or repr(error)
            if isinstance(error, Stuck):
                problem += f": {self._state()}"
        finally:
            self._clear()
        self.faults["refused at the limit"] += self.redis.refused if self.redis.limit else 0
        return Result(
            self.seed,
            problem,
            self.clock.moves,
            self.clock.now,
            self.faults + self.network.faults,
            self.invariants.checks,
            self.endings,
            list(self.clock.lines),
            self.network.refused,
        )

    def _state(self) -> str:
        state = next((p.state for p in self.learners if p.state), None)
        words = (
            f"durable step {self.invariants.step} of {self.run.steps}, learners {self.learners}, servers {self.servers}"
        )
        if state is not None:
            words += (
                f", step {state.step}, issued {state.issued}, pending {sorted(state.pending)}, due {sorted(state.due)}"
            )
            words += f", in flight {state.in_flight()}"
        tasks = self.redis.stream(self.keys.tasks)
        if tasks is not None:
            words += f", tasks {[decode_as(Task, f[b'b']).seq for f in tasks.entries.values()]}"
            words += f", placed {self.invariants.placed()}"
        return words

    def _clear(self) -> None:
        for learner in self.learners:
            if learner.alive:
                self.clock.kill(learner)
        for server in list(self.servers):
            self.kill_server(server)
        shutil.rmtree(self.folder, ignore_errors=True)


class _Lines(logging.Handler):
    """The product's own log lines, in the schedule's log."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(logging.INFO)
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        self._clock.tell(f"{record.name}: {record.getMessage()}")


def play(seed: int, knobs: Knobs | None = None, *, aloud: bool = False) -> Result:
    """The schedule of `seed`. aloud: with the product's log lines in it."""
    world = World(seed, knobs)
    root = logging.getLogger()
    handler, level = _Lines(world.clock), root.level
    if aloud:
        root.addHandler(handler)
        root.setLevel(logging.INFO)
    logging.disable(logging.NOTSET if aloud else logging.CRITICAL)
    try:
        return world.play()
    finally:
        logging.disable(logging.NOTSET)
        root.removeHandler(handler)
        root.setLevel(level)
