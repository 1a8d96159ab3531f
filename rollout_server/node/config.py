"""Settings of a node: section `engine`. The kind of engine is the union at `engine.kind`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from protocol.settings import Settings
from rollout_server.cpu_engine.config import SchedulerSettings

GPU_INTERPRETER = ".venv-engine/bin/python"
"""Where `make gpu-env` installs SGLang."""


class CpuEngine(SchedulerSettings):
    """The CPU engine for small models on CPUs."""

    type: Literal["cpu"] = "cpu"
    """Engine type: the CPU engine."""


class SglangEngine(Settings):
    """An SGLang server, launched as a child process."""

    type: Literal["sglang"] = "sglang"
    """Engine type: an SGLang server that the node launches."""
    python: str = ""
    """Python interpreter of the environment with SGLang, e.g. .venv-sglang/bin/python. Empty: the node's interpreter. A
    relative path is resolved against the working directory, then against Foray's checkout."""
    launcher: Path | None = None
    """Script to run instead of `-m sglang.launch_server`. CPUs need requirements/sglang_cpu_launch.py. Resolved like
    `python`."""
    args: tuple[str, ...] = ()
    """Additional server arguments, e.g. ["--tp-size", "2", "--mem-fraction-static", "0.8"]."""
    max_running: int = Field(default=256, ge=1)
    """Value of --max-running-requests of the server."""
    fp32_lm_head: bool = True
    """Compute the logits of a half-precision model in float32 (--enable-fp32-lm-head), as learner.model.fp32_lm_head
    does in a bfloat16 learner. Not used with --device cpu in `args`, where the weight may be packed."""


class AttachedEngine(Settings):
    """A running engine that the node does not own: it registers the engine and loads weights, but never restarts it."""

    type: Literal["attach"] = "attach"
    """Engine type: a running engine that the node attaches to."""
    url: str
    """Base URL of the engine, e.g. http://10.0.0.7:30000."""
    max_running: int = Field(default=256, ge=1)
    """Maximum number of concurrent requests, if the engine does not report it."""
    wait_s: float = Field(default=15.0, ge=0)
    """Timeout in seconds for its first answer. Later outages are waited out without a limit."""


EngineKind = Annotated[CpuEngine | SglangEngine | AttachedEngine, Field(discriminator="type")]


class NodeSettings(Settings):
    """One node and its engine. Any number of nodes may be started from the same file."""

    id: str = Field(default="", max_length=200, pattern=r"^[A-Za-z0-9._-]*$")
    """Name of the engine. Empty: `engine-<hostname>-<port>`, which is unique per node."""
    kind: EngineKind = CpuEngine()
    """The engine: `engine.kind.type` is cpu, sglang or attach."""
    host: str = ""
    """Address that the engine listens on. Empty: this machine's on the route to Redis, if the node has a token, else
    loopback."""
    advertise: str = Field(default="", pattern=r"^[^/\s]*$")
    """Address of the engine for rollout servers, HOST or HOST:PORT, if it differs from `host`: a name, another
    interface, an address behind NAT. Empty: `host`, or if that is 0.0.0.0 or ::, this machine's address on the route to
    Redis."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port that the engine listens on; 0 picks a free one."""
    role: Literal["rollout", "eval"] = "rollout"
    """`rollout`, or `eval` for an engine that serves evaluations only (`launch.eval_engines`)."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """What happens to requests in flight during a weight update. `in_place` keeps the KV cache of the old version for
    them, and requires SGLang without overlap scheduling, which would report a wrong version for one token."""
    poll_s: float = Field(default=0.25, gt=0)
    """Longest time in seconds between two reads of the target version. The learner wakes the node for each new one."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Interval in seconds at which the registration is renewed."""
    lease_s: float = Field(default=10.0, gt=0)
    """Lifetime of the registration in seconds: how long it outlives its node."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Time in seconds for the engine to become healthy after its launch. It starts again whenever the memory of its
    processes has grown: an engine that still loads is not given up."""
    update_timeout_s: float = Field(default=300.0, gt=0)
    """Timeout in seconds of a call that loads weights, or five times as long as the last one, or as the start of the
    engine, if that is more."""
    relaunches: int = Field(default=5, ge=0)
    """Maximum number of launches after a loss of the engine within an hour; then the node ends with exit code 2."""
    verify_attempts: int = Field(default=2, ge=1)
    """Maximum attempts to read a published version whose checksums are wrong, before the engine is quarantined. Its
    files may still be being copied at first."""
    probe_s: float = Field(default=2.0, gt=0)
    """Interval in seconds of the watchdog's probes for a sign of life: a generated token, or progress of the
    scheduler."""
    probe_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one probe, in seconds. A probe without an answer is no hang: see `hang_s`."""
    hang_s: float = Field(default=0.0, ge=0)
    """An engine without a sign of life gets no more requests; if the node launched it, it is killed and restarted. The
    limit is five times its longest recent silence that ended well, but at least this many seconds. 0: 30, for SGLang
    300, because it shows nothing within a step."""
    drain_s: float = Field(default=30.0, ge=0)
    """Time in seconds that requests in flight get to finish after SIGTERM. The rest are aborted, and continue at other
    engines with their tokens so far."""
    preempted: str = ""
    """File or URL that tells that this machine will be taken away: the engine drains as soon as the file exists, or the
    URL answers 200 with another text than FALSE. The clouds' addresses are in docs/clusters.md. Empty: SIGTERM only."""
