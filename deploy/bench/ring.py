"""The processes of the rollout benchmark: Redis, engines and a search that take their time, and a real rollout server.

This process plays the learner: it holds the lease, issues the tasks and reads the groups, through the learner's own
door to Redis.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.bench.base import Say
from deploy.bench.machine import cpu_seconds
from deploy.bench.script import Script
from deploy.plan import ProcessSpec, Ready
from deploy.ports import free_port
from deploy.readiness import Readiness
from deploy.redis_child import child_url, connect, find_server, redis_argv
from deploy.supervisor import Supervisor
from learner.redis_client import RunStore
from protocol.codec import decode, decode_as, encode
from protocol.errors import ForayError
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, Question, Task, TrajectoryGroup, WeightUpdate
from protocol.settings import REDIS_URL_VARIABLE

RUN = "bench"
LEASE_MS = 86_400_000
"""Nobody renews the lease: it outlives the benchmark."""
READY_S, SHUTDOWN_S = 120.0, 10.0


@dataclass(frozen=True)
class Played:
    """What one seed came to.

    seconds     of the clock, from the first task to the last group
    cpu_s       that the rollout server used meanwhile; `world_cpu_s`: that engines, search and Redis took
    loop_lag_s  the latest that the server's event loop was, by its own measurement each second
    """

    seconds: float
    cpu_s: float
    world_cpu_s: float
    loop_lag_s: float
    groups: list[TrajectoryGroup]


class Ring:
    """The running processes. `engines` and `search` are URLs; `pids` by name of the process."""

    def __init__(
        self, store: RunStore, redis_url: str, engines: Sequence[str], search: str, pids: dict[str, int]
    ) -> None:
        self._store, self._redis_url, self._pids = store, redis_url, pids
        self.engines, self.search = tuple(engines), search
        self._next_seq = 1

    def play(self, script: Script, seed: int, number: int, *, timeout_s: float) -> Played:
        """Issue one task a question, all at once, and wait for the last group. Raises ForayError when one fails."""
        count = script.draws.trajectories // script.group_size
        tasks = []
        for group in range(count):
            seq = self._next_seq + group
            question = Question(id=f"q{seq}", text=script.question(number, seed, group), answers=("0",))
            tasks.append((seq, encode(Task(seq=seq, question=question, group_size=script.group_size))))
        self._next_seq += count
        bodies: list[bytes] = []
        lag = 0.0
        begun, cpu = time.monotonic(), self._cpu_s()
        self._store.issue(0, tasks)
        while len(bodies) < count:
            if time.monotonic() - begun > timeout_s:
                raise ForayError(f"only {len(bodies)} of {count} groups came within {timeout_s:g} s")
            entries = self._store.read(count)
            self._store.ack([entry for entry, _ in entries])
            bodies += [fields[b"b"] for _, fields in entries]
            lag = max(lag, self._loop_lag_s())
        seconds = time.monotonic() - begun
        used = {name: after - cpu[name] for name, after in self._cpu_s().items()}
        groups = [message for message in map(decode, bodies) if isinstance(message, TrajectoryGroup)]
        if len(groups) < count:
            raise ForayError(f"{count - len(groups)} groups failed; the log of the rollout server says why")
        return Played(seconds, used.pop("rollout"), sum(used.values()), lag, groups)

    def _cpu_s(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}

    def _loop_lag_s(self) -> float:
        with connect(self._redis_url) as client:
            raw = client.get(self._store.keys.metrics("rollout", "rollout"))
        return decode_as(MetricsSnapshot, raw).values.get("event_loop_lag_s", 0.0) if isinstance(raw, bytes) else 0.0


@contextmanager
def running(directory: Path, script: Script, *, engines: int, groups: int, say: Say) -> Iterator[Ring]:
    """All processes for the time of the block, logs in `directory`. Raises ProcessFailed when one does not start."""
    script_file = directory / "script.json"
    script.save(script_file)
    redis_url = child_url(directory)
    supervisor = Supervisor(is_ready=Readiness(redis_url, RUN), ready_s=READY_S, shutdown_s=SHUTDOWN_S, say=say)

    def spawn(name: str, kind: str, argv: Sequence[str], ready: Ready, url: str) -> None:
        env = {"OMP_NUM_THREADS": "1", REDIS_URL_VARIABLE: redis_url}
        supervisor.spawn(ProcessSpec(name, kind, tuple(argv), directory / f"{name}.log", ready, url, env))

    def python(module: str, *argv: str) -> list[str]:
        return [sys.executable, "-m", module, *argv]

    def part(name: str, kind: str, module: str) -> str:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        spawn(name, kind, python(module, str(script_file), str(port)), Ready.ALIVE, url)
        return url

    try:
        server = redis_argv(find_server().path, directory, redis_url, maxmemory_mb=512)
        spawn("redis", "redis", server, Ready.PING, redis_url)
        search = part("search", "retriever", "deploy.bench.latency_search")
        urls = [part(f"engine-{i}", "engine", "deploy.bench.latency_engine") for i in range(engines)]
        supervisor.await_ready(list(supervisor.children))
        store = _learner(redis_url)
        _register(redis_url, store, urls)
        port = free_port()
        overrides = _overrides(directory, script, search, groups) | {"rollout.port": port}
        argv = python("rollout_server", *(f"{key}={value}" for key, value in overrides.items()))
        spawn("rollout", "rollout", argv, Ready.HTTP, f"http://127.0.0.1:{port}")
        supervisor.await_ready(["rollout"])
        pids = {name: child.pid for name, child in supervisor.children.items()}
        yield Ring(store, redis_url, urls, search, pids)
        supervisor.check()
        store.close()
    finally:
        supervisor.stop()


def _overrides(directory: Path, script: Script, search: str, groups: int) -> dict[str, Any]:
    """The rollout server's settings; whatever is not named here is as in every run."""
    return {
        "run.id": RUN,
        "run.model": directory,
        "run.group_size": script.group_size,
        "rollout.id": "rollout",
        "rollout.concurrency_groups": groups,
        "rollout.drain_s": 0,
        "rollout.generate_timeout_s": 600,
        "rollout.episode.template": "demo",
        "rollout.episode.max_turns": script.draws.turns - 1,
        "rollout.search.type": "http",
        "rollout.search.urls": search,
    }


def _learner(redis_url: str) -> RunStore:
    store = RunStore(redis_url, RUN)
    store.prepare()
    token = secrets.token_hex(8)
    epoch = store.acquire(token, 0, LEASE_MS, takeover=True)
    assert isinstance(epoch, int)
    store.own(epoch, token)
    store.target(WeightUpdate(run=RUN, epoch=epoch, step=0, digest="", path=""), "ready")
    return store


def _register(redis_url: str, store: RunStore, urls: Sequence[str]) -> None:
    """What a node would say of each engine, once and for the whole benchmark."""
    with connect(redis_url) as client:
        for index, url in enumerate(urls):
            name = f"engine-{index}"
            info = EngineInfo(id=name, url=url, state=NodeState.READY, epoch=1, step=0, incarnation="1")
            client.hset(store.keys.engine(name), "b", encode(info))
            client.zadd(store.keys.engines, {name: time.time() + LEASE_MS / 1000})
