"""What both parts of `foray bench transport` need: a Redis, a run in it, and groups of a given size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.bench.base import Say
from deploy.child import Child
from deploy.plan import ProcessSpec, Ready
from deploy.readiness import Readiness
from deploy.redis_child import child_url, find_server, redis_argv
from deploy.supervisor import Supervisor

if TYPE_CHECKING:
    from learner.redis_client import RunStore
    from protocol.messages import TrajectoryGroup

RUN = "bench"
LEASE_MS = 86_400_000


@dataclass
class Ring:
    """A Redis for the time of a block, and a run in it whose learner is this process."""

    url: str
    redis: Child
    store: RunStore
    supervisor: Supervisor


@contextmanager
def ring(directory: Path, maxmemory_mb: int, say: Say) -> Iterator[Ring]:
    """Redis as the launcher starts it (append-only file, noeviction), the run's functions, streams and lease."""
    from learner.redis_client import RunStore

    url = child_url(directory)
    supervisor = Supervisor(is_ready=Readiness(url, RUN), ready_s=20.0, shutdown_s=10.0, say=say)
    try:
        argv = redis_argv(find_server().path, directory, url, maxmemory_mb=maxmemory_mb)
        child = supervisor.spawn(ProcessSpec("redis", "redis", argv, directory / "redis.log", Ready.PING, url))
        supervisor.await_ready(["redis"])
        store = RunStore(url, RUN)
        try:
            store.prepare()
            epoch = store.acquire("bench", 0, LEASE_MS, takeover=True)
            assert isinstance(epoch, int)
            store.own(epoch, "bench")
            yield Ring(url, child, store, supervisor)
        finally:
            store.close()
    finally:
        supervisor.stop()


def a_group(group_size: int, tokens: int) -> TrajectoryGroup:
    """A group of trajectories of `tokens` tokens, about half of them sampled, the rest prompt and observation."""
    from protocol.testing import make_group, make_trajectory

    half, quarter = tokens // 2, tokens // 4
    one = make_trajectory(
        1.0,
        prompt=range(quarter),
        first=range(8),
        observation=range(tokens - half - quarter),
        last=range(half - 8),
    )
    return make_group(1, run=RUN).model_copy(update={"trajectories": (one,) * group_size})


def a_task(seq: int, group_size: int) -> bytes:
    """The encoded task of `seq`."""
    from protocol.codec import encode
    from protocol.testing import make_task

    return encode(make_task(seq, group_size=group_size))
