"""The processes of the rollout benchmark: Redis, simulated engines, a simulated retriever, and real rollout servers.

This process acts as the learner (it holds the lease, issues tasks and reads groups with the learner's Redis client) and
as the nodes (it reports each engine's load, updates its version and detects when it is down).
"""

from __future__ import annotations

import json
import math
import secrets
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.base import Say, cpu_seconds
from benchmarks.rollout.routing import OURS
from benchmarks.rollout.script import Faults, Script
from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.supervisor import Readiness, Supervisor
from deploy.run.redis_server import child_url, connect, find_server, redis_argv
from learner.delivery.store import RunStore
from protocol.codec import decode, decode_as, encode
from protocol.errors import ForayError
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, Question, Task, TrajectoryGroup, WeightUpdate
from protocol.runtime.net import free_port
from protocol.settings import REDIS_URL_VARIABLE

RUN = "bench"
LEASE_MS = 86_400_000
"""TTL of the lease: longer than the benchmark, so it is not renewed."""
READY_S, SHUTDOWN_S = 120.0, 10.0
HEARTBEAT_S, SNAPSHOT_S = 0.5, 1.5
"""Seconds between two reports of an engine, and until the last counters of a rollout server are in Redis."""
MAX_LAG = 1000
"""Maximum lag, large: the benchmark measures routing, and trajectories that are too old would end early."""


@dataclass(frozen=True)
class Played:
    """Figures of one play.

    seconds     wall-clock time from the first task to the last group
    tail_s      of these, after 95 % of the groups had arrived
    cpu_s       CPU time of the rollout server; `world_cpu_s`: of engines, search and Redis
    loop_lag_s  maximum delay of the server's event loop, which it measures each second
    failovers   additional requests for turns
    """

    seconds: float
    tail_s: float
    cpu_s: float
    world_cpu_s: float
    loop_lag_s: float
    failovers: float
    groups: list[TrajectoryGroup]


class RolloutRing:
    """The running processes. `engines` and `search` are URLs.

    groups  concurrent groups per rollout server
    """

    def __init__(
        self, directory: Path, supervisor: Supervisor, redis_url: str, engines: Sequence[str], search: str, groups: int
    ) -> None:
        self._directory, self._supervisor, self._redis_url, self._groups = directory, supervisor, redis_url, groups
        self.engines, self.search = tuple(engines), search
        self.store = _learner(redis_url)
        self._next_seq = 1
        self._plays = 0
        self._nodes = Nodes(redis_url, self.store, engines)

    def play(self, script: Script, seed: int, policy: str, faults: Faults, *, timeout_s: float) -> Played:
        """Issue one task per question and wait for the last group, with a rollout server that routes by `policy`.

        Raises ForayError if a group fails or does not arrive in time.
        """
        name = f"rollout-{self.next_play()}"
        count = script.draws.trajectories // script.group_size
        tasks = []
        for group in range(count):
            seq = self._next_seq + group
            question = Question(id=f"q{seq}", text=script.question(self._plays, seed, group), answers=("0",))
            tasks.append((seq, encode(Task(seq=seq, question=question, group_size=script.group_size))))
        self._next_seq += count
        self._nodes.report()
        self._serve(name, script, policy)
        try:
            return self._play(name, tasks, faults, timeout_s)
        finally:
            self._supervisor.stop([name])

    def next_play(self) -> int:
        """Return the number of the next play, which distinguishes repetitions of the same draws."""
        self._plays += 1
        return self._plays

    def _play(self, name: str, tasks: Sequence[tuple[int, bytes]], faults: Faults, timeout_s: float) -> Played:
        bodies: list[bytes] = []
        arrived: list[float] = []
        lag = failovers = 0.0
        begun, cpu = time.monotonic(), self._cpu_s()
        self.store.issue(0, tasks)
        events = self._nodes.events(faults)
        while len(bodies) < len(tasks):
            now = time.monotonic() - begun
            if now > timeout_s:
                raise ForayError(f"only {len(bodies)} of {len(tasks)} groups arrived within {timeout_s:g} s")
            while events and events[0].at_s <= now:
                events.pop(0).act()
            self._nodes.report()
            entries = self.store.read(len(tasks))
            self.store.ack([entry for entry, _ in entries])
            bodies += [fields[b"b"] for _, fields in entries]
            arrived += [time.monotonic() - begun] * len(entries)
            values = self._values(name)
            lag = max(lag, values.get("event_loop_lag_s", 0.0))
        seconds, tail_s = arrived[-1], arrived[-1] - arrived[math.ceil(0.95 * len(arrived)) - 1]
        used = {process: after - cpu[process] for process, after in self._cpu_s().items()}
        time.sleep(SNAPSHOT_S)
        failovers = self._values(name).get("failovers", 0.0)
        groups = [message for message in map(decode, bodies) if isinstance(message, TrajectoryGroup)]
        if len(groups) < len(tasks):
            raise ForayError(f"{len(tasks) - len(groups)} groups failed; see the log of {name}")
        return Played(seconds, tail_s, used.pop(name), sum(used.values()), lag, failovers, groups)

    def _serve(self, name: str, script: Script, policy: str) -> None:
        """Start the rollout server, with default settings except those below."""
        port = free_port()
        overrides: dict[str, Any] = {
            "run.id": RUN,
            "run.model": self._directory,
            "run.group_size": script.group_size,
            "run.max_lag": MAX_LAG,
            "rollout.id": name,
            "rollout.port": port,
            "rollout.concurrency_groups": self._groups,
            "rollout.drain_s": 0,
            "rollout.generate_timeout_s": 600,
            "rollout.adaptive": policy == OURS,
            "rollout.episode.template": "demo",
            "rollout.episode.max_turns": script.draws.turns - 1,
            "rollout.search.type": "http",
            "rollout.search.urls": self.search,
        }
        argv = _python("benchmarks.rollout.routing", policy, *(f"{key}={value}" for key, value in overrides.items()))
        url = f"http://127.0.0.1:{port}"
        self._supervisor.spawn(_spec(name, "rollout", argv, self._directory, Ready.HTTP, url, self._redis_url))
        self._supervisor.await_ready([name])

    def _cpu_s(self) -> dict[str, float]:
        return {name: cpu_seconds(child.pid) for name, child in self._supervisor.children.items()}

    def _values(self, name: str) -> dict[str, float]:
        with connect(self._redis_url) as client:
            raw = client.get(self.store.keys.metrics("rollout", name))
        return dict(decode_as(MetricsSnapshot, raw).values) if isinstance(raw, bytes) else {}


@dataclass(frozen=True)
class ScheduledEvent:
    """A call of `act`, `at_s` seconds after the start of a play."""

    at_s: float
    act: Callable[[], None]


class Nodes:
    """The role of all nodes: report the load, update weights, detect that an engine is down."""

    def __init__(self, redis_url: str, store: RunStore, urls: Sequence[str]) -> None:
        self._redis_url, self._store, self._urls = redis_url, store, urls
        self._steps, self._lives = [0] * len(urls), [1] * len(urls)
        self._away = [False] * len(urls)
        self._pause_until = [0.0] * len(urls)
        self._reported = 0.0

    def report(self) -> None:
        """Send a heartbeat of every engine, at most every HEARTBEAT_S."""
        now = time.monotonic()
        if now - self._reported < HEARTBEAT_S:
            return
        self._reported = now
        with connect(self._redis_url) as client:
            for index in range(len(self._urls)):
                info = self._info(index, now)
                client.hset(self._store.keys.engine(info.id), "b", encode(info))
                client.zadd(self._store.keys.engines, {info.id: time.time() + LEASE_MS / 1000})

    def events(self, faults: Faults) -> list[ScheduledEvent]:
        """Return the events of `faults`, in order of time."""
        found = []
        if faults.down >= 0:
            found.append(
                ScheduledEvent(faults.down_s, lambda: self._ask(faults.down, "down", {"seconds": faults.away_s}))
            )
        for swap_s in faults.swaps_s:
            found.append(ScheduledEvent(swap_s, self._target))
            for index in range(len(self._urls)):
                at_s = swap_s + index * faults.pause_s
                found.append(ScheduledEvent(at_s, lambda index=index: self._update(index, faults.pause_s)))  # type: ignore[misc]
        return sorted(found, key=lambda event: event.at_s)

    def _info(self, index: int, now: float) -> EngineInfo:
        state, load = NodeState.READY, {}
        try:
            load = self._load(index)
            self._lives[index] += self._away[index]
            self._away[index] = False
        except OSError:
            self._away[index], state = True, NodeState.GONE
        if now < self._pause_until[index]:
            state = NodeState.SYNCING
        return EngineInfo(
            id=f"engine-{index}",
            url=self._urls[index],
            state=state,
            epoch=1,
            step=self._steps[index],
            incarnation=str(self._lives[index]),
            max_running=int(load.get("max_running_requests", 0)),
            max_tokens=int(load.get("max_total_num_tokens", 0)),
            running=int(load.get("num_running_reqs", 0)),
            waiting=int(load.get("num_waiting_reqs", 0)),
            token_usage=float(load.get("token_usage", 0.0)),
        )

    def _load(self, index: int) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._urls[index]}/v1/loads", timeout=5) as response:
            load: dict[str, Any] = json.load(response)["loads"][0]
        return load

    def _target(self) -> None:
        step = max(self._steps) + 1
        self._store.target(WeightUpdate(run=RUN, epoch=1, step=step, digest="", path=""), "ready")

    def _update(self, index: int, pause_s: float) -> None:
        announced = self._store.announced()
        assert announced is not None
        self._steps[index] = announced.step
        self._pause_until[index] = time.monotonic() + pause_s
        self._ask(index, "swap", {"version": announced.label, "seconds": pause_s})
        self._reported = 0.0

    def _ask(self, index: int, what: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self._urls[index]}/bench/{what}", data=data)
        # an engine that is down misses its update, as with a real node: the new process loads the newest version
        with suppress(OSError), urllib.request.urlopen(request, timeout=5):
            pass


@contextmanager
def running(directory: Path, script: Script, *, groups: int, say: Say) -> Iterator[RolloutRing]:
    """Run all processes except rollout servers while the block runs, with logs in `directory`.

    Raises ProcessFailed if one does not start.
    """
    script_file = directory / "script.json"
    script.save(script_file)
    redis_url = child_url(directory)
    supervisor = Supervisor(is_ready=Readiness(redis_url, RUN), ready_s=READY_S, shutdown_s=SHUTDOWN_S, say=say)

    def part(name: str, kind: str, module: str, *argv: str) -> str:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = _python(module, str(script_file), str(port), *argv)
        supervisor.spawn(_spec(name, kind, command, directory, Ready.ALIVE, url, redis_url))
        return url

    try:
        server = redis_argv(find_server().path, directory, redis_url, maxmemory_mb=512)
        supervisor.spawn(_spec("redis", "redis", server, directory, Ready.PING, redis_url, redis_url))
        search = part("search", "retriever", "benchmarks.rollout.latency_search")
        engines = range(len(script.speeds))
        urls = [part(f"engine-{i}", "engine", "benchmarks.rollout.latency_engine", str(i)) for i in engines]
        supervisor.await_ready(list(supervisor.children))
        ring = RolloutRing(directory, supervisor, redis_url, urls, search, groups)
        yield ring
        supervisor.check()
        ring.store.close()
    finally:
        supervisor.stop()


def _python(module: str, *argv: str) -> list[str]:
    return [sys.executable, "-m", module, *argv]


def _spec(
    name: str, kind: str, argv: Sequence[str], directory: Path, ready: Ready, url: str, redis_url: str
) -> ProcessSpec:
    env = {"OMP_NUM_THREADS": "1", REDIS_URL_VARIABLE: redis_url}
    return ProcessSpec(name, kind, tuple(argv), directory / f"{name}.log", ready, url, env)


def _learner(redis_url: str) -> RunStore:
    store = RunStore(redis_url, RUN)
    store.prepare()
    token = secrets.token_hex(8)
    epoch = store.acquire(token, 0, LEASE_MS, takeover=True)
    assert isinstance(epoch, int)
    store.set_owner(epoch, token)
    store.target(WeightUpdate(run=RUN, epoch=epoch, step=0, digest="", path=""), "ready")
    return store
