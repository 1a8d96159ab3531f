"""The processes of `foray bench weights`: Redis, and nodes with embedded engines. This process plays the learner."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.bench.base import Say
from deploy.plan import ProcessSpec, Ready
from deploy.readiness import Readiness
from deploy.redis_child import child_url, find_server, redis_argv
from deploy.supervisor import Supervisor
from learner.config import DiskPublishSettings, DistributedPublishSettings
from learner.redis_client import RunStore
from protocol.errors import ForayError
from protocol.messages import EngineInfo, NodeState
from protocol.settings import REDIS_URL_VARIABLE, RunSettings
from protocol.versions import PolicyVersion

if TYPE_CHECKING:
    import torch

    from learner.publish.base import Publisher

RUN = "bench"
LEASE_MS = 86_400_000
POLL_S = 0.005
TIMEOUT_S = 120.0


class Fleet:
    """A run whose learner is this process."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.run = RunSettings(id=RUN, dir=directory / "run", redis_url=redis_url, model=directory / "model")
        self.store = RunStore(redis_url, RUN)
        self.store.prepare()
        self.epoch = 0

    def begin(self, settings: DiskPublishSettings | DistributedPublishSettings) -> Publisher:
        """A new epoch, and its publisher."""
        epoch = self.store.acquire("bench", self.epoch, LEASE_MS, takeover=True)
        assert isinstance(epoch, int)
        self.store.own(epoch, "bench")
        self.epoch = epoch
        return settings.build(self.run, sorted(self.run.model.glob("*.json")), self.store)

    def publish(self, publisher: Publisher, step: int, weights: dict[str, torch.Tensor]) -> tuple[float, float]:
        """(seconds until it was announced, seconds until every engine was READY at it)."""
        version = PolicyVersion(self.epoch, step)
        began = time.monotonic()
        # a copy each, as a training engine yields them
        update = publisher.publish(version, ((name, tensor.clone()) for name, tensor in weights.items()))
        publisher.announce(update, "ready")
        announced = time.monotonic() - began
        self.await_version(version)
        whole = time.monotonic() - began
        publisher.collect([])
        return announced, whole

    def await_version(self, version: PolicyVersion) -> list[EngineInfo]:
        """The engines, once each of them is READY at `version`."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            engines = self.store.engines()
            if engines and all((e.state, e.version) == (NodeState.READY, version) for e in engines):
                return engines
            if time.monotonic() > deadline:
                states = ", ".join(f"{e.id} is {e.state} at {e.version.label} {e.detail}" for e in engines)
                raise ForayError(f"the engines did not get {version.label} within {TIMEOUT_S:g} s: {states}")
            time.sleep(POLL_S)

    def pauses(self) -> list[float]:
        """Seconds that each engine was paused by its last update."""
        return [engine.pause_s for engine in self.store.engines()]


@contextmanager
def running(directory: Path, *, engines: int, say: Say) -> Iterator[Fleet]:
    """Redis and `engines` nodes of `directory`/model, for the time of the block."""
    redis_url = child_url(directory)
    supervisor = Supervisor(is_ready=Readiness(redis_url, RUN), ready_s=TIMEOUT_S, shutdown_s=15.0, say=say)

    def spawn(name: str, kind: str, argv: Sequence[str], ready: Ready) -> None:
        env = {"OMP_NUM_THREADS": "1", REDIS_URL_VARIABLE: redis_url}
        supervisor.spawn(ProcessSpec(name, kind, tuple(argv), directory / f"{name}.log", ready, redis_url, env))

    try:
        spawn("redis", "redis", redis_argv(find_server().path, directory, redis_url, maxmemory_mb=128), Ready.PING)
        supervisor.await_ready(["redis"])
        fleet = Fleet(directory, redis_url)
        config = directory / "nodes.json"
        config.write_text(json.dumps({"run": fleet.run.model_dump(mode="json"), "engine": {"drain_s": 0.1}}))
        for number in range(engines):
            argv = [sys.executable, "-m", "rollout_server.node", "--config", str(config), f"engine.id=engine-{number}"]
            spawn(f"engine-{number}", "engine", argv, Ready.ENGINE)
        supervisor.await_ready([f"engine-{number}" for number in range(engines)])
        yield fleet
        supervisor.check()
        fleet.store.close()
    finally:
        supervisor.stop()
