"""Settings of a node: section `engine` of the tree. Which engine it runs is the union at `engine.kind`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from protocol.settings import Settings


class CpuEngine(Settings):
    """The embedded engine for small models on CPUs."""

    type: Literal["cpu"] = "cpu"
    """Names this kind."""
    threads: int = Field(default=1, ge=1)
    """Threads that compute."""
    max_running: int = Field(default=64, ge=1)
    """Requests decoded together; the others queue."""
    max_total_tokens: int = Field(default=65536, ge=256)
    """Tokens of the KV cache."""


class SglangEngine(Settings):
    """A real SGLang server, launched as a child process."""

    type: Literal["sglang"] = "sglang"
    """Names this kind."""
    python: str = ""
    """Interpreter of the environment that holds SGLang, e.g. .venv-sglang/bin/python; empty: the one that runs the
    node. A relative path is looked for where the node was started, then in Foray's checkout."""
    launcher: Path | None = None
    """Script to run in place of `-m sglang.launch_server`; CPUs need requirements/sglang_cpu_launch.py. Found like
    `python`."""
    args: tuple[str, ...] = ()
    """More arguments for the server, e.g. ["--tp-size", "2", "--mem-fraction-static", "0.8"]."""
    max_running: int = Field(default=256, ge=1)
    """--max-running-requests of the server."""
    fp32_lm_head: bool = True
    """Logits of a model served in half precision are float32 (--enable-fp32-lm-head), as learner.model.fp32_lm_head
    makes those of a bfloat16 learner. Left out where `args` has --device cpu: its weight may be packed there."""


class AttachedEngine(Settings):
    """An engine that others run: the node registers it and loads weights, and never restarts it."""

    type: Literal["attach"] = "attach"
    """Names this kind."""
    url: str
    """Base URL, e.g. http://10.0.0.7:30000."""
    max_running: int = Field(default=256, ge=1)
    """Its capacity, where it does not say so itself."""
    wait_s: float = Field(default=15.0, ge=0)
    """How long it may take to answer at first. Later the node waits for as long as it lives."""


EngineKind = Annotated[CpuEngine | SglangEngine | AttachedEngine, Field(discriminator="type")]


class NodeSettings(Settings):
    """One node and its engine. Any number of nodes may be started from the same file."""

    id: str = Field(default="", max_length=200, pattern=r"^[A-Za-z0-9._-]*$")
    """Name of the engine. Empty: `engine-<hostname>-<port>`, unique among the nodes of one file."""
    kind: EngineKind = CpuEngine()
    """Which engine: `engine.kind.type` is cpu, sglang or attach."""
    host: str = "127.0.0.1"
    """Address the engine listens on, and the one in its registration, for rollout servers."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port the engine listens on; 0 takes a free one."""
    role: Literal["rollout", "eval"] = "rollout"
    """`eval` engines serve evaluation only."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """How requests in flight are held during a swap. `in_place` keeps the old version's KV cache for them, and costs
    SGLang its overlap scheduling: with it, versions in place would be wrong by a token."""
    poll_s: float = Field(default=0.25, gt=0)
    """How often the target version is read."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """How often the registration is renewed."""
    lease_s: float = Field(default=10.0, gt=0)
    """How long a registration outlives its node."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long the engine may take to answer after its launch."""
    update_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of each call of a weight update."""
    verify_attempts: int = Field(default=2, ge=1)
    """Times a published version that fails its checksums is read before the engine is quarantined: a copy may be under
    way the first time."""
    probe_s: float = Field(default=2.0, gt=0)
    """How often the watchdog looks for a sign of life: a generated token, or figures of the scheduler that move."""
    probe_timeout_s: float = Field(default=10.0, gt=0)
    """How long one look may take."""
    probe_failures: int = Field(default=3, ge=1)
    """An engine that refuses so many connections in a row is gone."""
    hang_s: float = Field(default=30.0, gt=0)
    """An engine without a sign of life for so long takes no more traffic; one of our own is killed and restarted."""
    drain_s: float = Field(default=30.0, ge=0)
    """After SIGTERM: seconds that requests in flight may take to finish. Those that are left are ended with what they
    have, and go on elsewhere from there."""
    keep_adapters: int = Field(default=2, ge=1)
    """LoRA adapters that stay loaded, the newest ones: requests that began with an older one may still run."""
