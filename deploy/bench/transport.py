"""`foray bench transport`: groups from a rollout server's memory into the learner's, through one Redis.

chain    encode + publish (the function that also acknowledges the task) + read + decode and check, a group at a time;
         beside it the same bytes by plain XADD and XREADGROUP, in turn, so that both see the same machine
load     64 rollout clients in processes of their own. First nobody reads, until Redis refuses (back-pressure); then
         the learner's side reads, decodes and acknowledges for as long as `minutes` says, while memory and event loops
         are watched. Every seq must arrive exactly once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from deploy.bench.base import BenchSettings, Measured, Say, Target


class TransportBench(BenchSettings):
    """The groups, and how many clients push them for how long."""

    help: ClassVar[str] = "groups/s through encode, publish, read, decode, against raw XADD and XREADGROUP"
    quick: ClassVar[dict[str, Any]] = {
        "groups": 20, "tokens": 256, "clients": 4, "processes": 1, "minutes": 0.03, "maxmemory_mb": 24
    }  # fmt: skip
    targets: ClassVar[tuple[Target, ...]] = (Target("ratio", 0.6, "groups a second over plain XADD and XREADGROUP"),)
    modules: ClassVar[tuple[str, ...]] = (
        "protocol",
        "rollout_server/redis_client.py",
        "rollout_server/sink.py",
        "learner/redis_client.py",
        "learner/entry.py",
        "learner/source.py",
        "deploy/bench/transport*.py",
    )

    group_size: int = Field(default=8, ge=1)
    """Trajectories in a group."""
    tokens: int = Field(default=2048, ge=8)
    """Tokens of a trajectory, half of them sampled."""
    groups: int = Field(default=400, ge=10)
    """Groups of the chain, ours and the baseline's."""
    clients: int = Field(default=64, ge=1)
    """Rollout clients of the load, each with connections of its own."""
    processes: int = Field(default=2, ge=1)
    """Processes among which the clients are divided."""
    minutes: float = Field(default=1.0, gt=0)
    """How long the load is held after the back-pressure was seen."""
    rate: float = Field(default=0.0, ge=0)
    """Most groups a second of the held load; 0: as many as go through."""
    maxmemory_mb: int = Field(default=256, ge=16)
    """Memory limit of the Redis (MiB)."""

    def measure(self, say: Say) -> Measured:
        """The chain, then the load, each on a Redis of its own."""
        from deploy.bench.transport_chain import chain
        from deploy.bench.transport_load import load

        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            ours, raw = chain(self, Path(name), say)
        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            held = load(self, Path(name), say)
        return Measured(
            value=ours["groups_per_s"],
            unit="groups/s",
            baseline={"name": "plain XADD + XREADGROUP of the same bytes", **raw},
            ratio=ours["groups_per_s"] / raw["groups_per_s"],
            details={"chain": ours, "load": held},
        )
