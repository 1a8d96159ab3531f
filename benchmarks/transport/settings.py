"""Settings of `foray bench transport`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from benchmarks.base import BenchSettings, Target


class TransportBench(BenchSettings):
    """Settings of `foray bench transport`."""

    help: ClassVar[str] = "groups/s through encode, publish, read, decode, against raw XADD and XREADGROUP"
    quick: ClassVar[dict[str, Any]] = {
        "groups": 20, "tokens": 256, "clients": 4, "processes": 1, "minutes": 0.03, "maxmemory_mb": 24
    }  # fmt: skip
    targets: ClassVar[tuple[Target, ...]] = (Target("ratio", 0.6, "groups a second over plain XADD and XREADGROUP"),)
    runner: ClassVar[str] = "benchmarks.transport.bench:measure"
    modules: ClassVar[tuple[str, ...]] = (
        "protocol",
        "rollout_server/dispatch/publisher.py",
        "learner/delivery/store.py",
        "learner/delivery/entry.py",
        "learner/delivery/consumer.py",
        "benchmarks/transport/*.py",
    )

    group_size: int = Field(default=8, ge=1)
    """Trajectories per group."""
    tokens: int = Field(default=2048, ge=8)
    """Tokens per trajectory, half of them sampled."""
    groups: int = Field(default=400, ge=10)
    """Groups in the chain, for Foray and for the baseline."""
    clients: int = Field(default=64, ge=1)
    """Rollout clients in the load phase, each with its own connections."""
    processes: int = Field(default=2, ge=1)
    """Processes for the clients."""
    minutes: float = Field(default=1.0, gt=0)
    """Duration of the load after back-pressure occurred, in minutes."""
    rate: float = Field(default=0.0, ge=0)
    """Maximum groups/s of the load; 0: no limit."""
    maxmemory_mb: int = Field(default=256, ge=16)
    """Memory limit of Redis, in MiB."""
