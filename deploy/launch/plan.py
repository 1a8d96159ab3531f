"""The processes of a run: a pure function from the configuration to process specs.

It starts nothing, chooses no port and reads no file (of the model it takes the size), so `foray up --dry-run` works
without the packages of the processes. Every process reads the same resolved file; overrides distinguish them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from deploy.config import RunConfig
from deploy.hardware.assign import NO_GPUS, Placement
from deploy.hardware.inventory import VISIBLE
from deploy.run.addresses import Addresses
from deploy.run.redis_server import redis_argv
from deploy.secrets.env import SECRET_VARIABLES, env_of
from protocol.redaction import is_secret_name
from protocol.settings import REDIS_URL_VARIABLE

KINDS = ("redis", "retriever", "engine", "rollout", "learner")
"""Start order. A kind may need earlier ones; engines, rollout servers and the learner may start in any order."""

DRAIN_S = 2


class Ready(StrEnum):
    """Condition for a process to be ready."""

    PING = "answers PING"
    HTTP = "GET /ready returns 200"
    ALIVE = "GET /health returns 200"
    REGISTERED = "registered in Redis"
    ENGINE = "registered in Redis as ready"
    RUNNING = "running"


ELASTIC_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable of torchrun: seconds between SIGTERM and SIGKILL of its ranks."""
CHECKPOINT_BYTES_PER_S = 0.25e9
"""A slow network disk: an upper bound on the time of a stop, which ends as soon as the checkpoint is written."""
BYTES_PER_WEIGHT = 2
"""Models are usually stored in bfloat16; for float32 files the bound is twice as long."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    name      unique in the run, and the name of its log file
    kind      one of KINDS
    argv      command line
    env       environment variables added to the launcher's
    hidden    environment variables of the launcher that this process does not inherit
    log       file for its stdout and stderr
    ready     readiness condition; `url` if that needs an address
    restarts  maximum number of restarts within an hour; 0: its exit ends the run
    stop_s    seconds that it may need after SIGTERM, beyond launch.shutdown_s
    """

    name: str
    kind: str
    argv: tuple[str, ...]
    log: Path
    ready: Ready
    url: str = ""
    env: dict[str, str] = field(default_factory=dict, repr=False)
    restarts: int = 0
    hidden: tuple[str, ...] = ()
    stop_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `--dry-run --json` and run.json, without secrets and without the Redis URL."""
        return {
            "name": self.name,
            "kind": self.kind,
            "argv": list(self.argv),
            "env": {
                name: value
                for name, value in self.env.items()
                if name != REDIS_URL_VARIABLE and not is_secret_name(name)
            },
            "log": str(self.log),
            "ready": str(self.ready),
            "url": self.url,
            "restarts": self.restarts,
        }


def checkpoint_s(config: RunConfig) -> float:
    """Return how many seconds the learner's last checkpoint may take: 12 bytes per parameter (float32 weights and two
    moments), written and hashed at CHECKPOINT_BYTES_PER_S; twice that if one may be in the background at the signal.
    0 for adapters, or if the model's size is unknown here.
    """
    if config.learner.model.lora.rank:
        return 0.0
    weights = sum(path.stat().st_size for path in config.run.model.glob("*.safetensors"))
    checkpoints = 2 if config.learner.async_checkpoints else 1
    return checkpoints * weights / BYTES_PER_WEIGHT * 12 / CHECKPOINT_BYTES_PER_S


def _limits(config: RunConfig, kind: str, cores: int, stop_s: float) -> dict[str, str]:
    """Return the variables for threads, and for the time that torchrun gives its ranks after SIGTERM (else 30 s)."""
    threads = learner_threads(config, cores) if kind == "learner" else config.launch.threads
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    if kind == "learner" and config.launch.learner_ranks > 1:
        limits[ELASTIC_TIMEOUT] = str(math.ceil(config.launch.shutdown_s + stop_s))
    return limits


def plan(
    config: RunConfig,
    addresses: Addresses,
    *,
    python: str,
    resolved: Path,
    read_secrets: bool = True,
    takeover: bool = False,
    placement: Placement = NO_GPUS,
    cores: int = 1,
) -> list[ProcessSpec]:
    """Return the processes of `config` in start order; `resolved` is the YAML file that each of them reads.

    With `launch.secrets` each process gets the variables in the file of its role, unless `read_secrets` is False (to
    show the plan only). `placement` has the GPUs of each process, `cores` are this machine's. Raises UserError if
    such a file is missing.
    """
    launch, run = config.launch, config.run
    env = {"PYTHONUNBUFFERED": "1", **({} if launch.secrets else {REDIS_URL_VARIABLE: addresses.redis_url})}
    # which GPUs `launch.env` shows was decided by the placement
    extra_env = {name: value for name, value in launch.env.items() if name != VISIBLE or not placement.gpus}
    hidden = SECRET_VARIABLES if launch.secrets else ()

    def process(name: str, kind: str, module: str, *overrides: str, ready: Ready) -> ProcessSpec:
        restarts = launch.restart_learner if kind == "learner" else launch.restarts
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.learner_ranks))
        ranked = torchrun if kind == "learner" and launch.learner_ranks > 1 and not launch.learner_prefix else ()
        prefix = launch.learner_prefix if kind == "learner" else ()
        argv = (*prefix, python, *ranked, "-m", module, "--config", str(resolved), *overrides)
        own = env_of(launch.secrets, kind, addresses.redis_url) if launch.secrets and read_secrets else {}
        log = run.dir / "logs" / f"{name}.log"
        stop_s = checkpoint_s(config) if kind == "learner" else 0.0
        limits = _limits(config, kind, cores, stop_s)
        # with a prefix the scheduler shows each rank its GPUs
        mine = {**limits, **env, **own, **extra_env, **({} if prefix else placement.environment(name))}
        return ProcessSpec(name, kind, argv, log, ready, "", mine, restarts, hidden, stop_s)

    specs: list[ProcessSpec] = [_redis(config, addresses)] if addresses.server is not None else []
    for index in range(1, config.num_retrievers + 1):
        extra = (f"retriever.id=retriever-{index}", *_only_first("retriever", index, config.retriever.port))
        specs.append(process(f"retriever-{index}", "retriever", "retriever", *extra, ready=Ready.REGISTERED))
    for name, role in config.engine_roles.items():
        extra = (f"engine.id={name}", f"engine.role={role}", *_drain("engine", config.engine.model_fields_set))
        if config.engine.port and name != "engine-1":  # only one engine can listen there
            extra = (*extra, "engine.port=0")
        specs.append(process(name, "engine", "rollout_server.node", *extra, ready=Ready.ENGINE))
    for index in range(1, launch.rollouts + 1):
        name = f"rollout-{index}"
        port = _only_first("rollout", index, config.rollout.port)
        extra = (f"rollout.id={name}", *port, *_drain("rollout", config.rollout.model_fields_set))
        # before a version is published: evaluations may precede the learner
        specs.append(process(name, "rollout", "rollout_server", *extra, ready=Ready.REGISTERED))
    if launch.learner:
        extra = ("--takeover",) if takeover else ()
        specs.append(process("learner", "learner", "learner", *extra, ready=Ready.RUNNING))
    return specs


def learner_threads(config: RunConfig, cores: int) -> int:
    """Return the threads of a learner rank: an offloaded optimizer updates on the CPU, so ranks divide the cores."""
    launch = config.launch
    if launch.learner_threads or not config.learner.engine.offload_optimizer:
        return launch.learner_threads or launch.threads
    return max(launch.threads, cores // launch.learner_ranks)


def _redis(config: RunConfig, addresses: Addresses) -> ProcessSpec:
    directory = (config.run.dir / "redis").absolute()
    assert addresses.server is not None
    launch = config.launch
    limit = launch.redis_maxmemory_mb
    argv = redis_argv(addresses.server, directory, addresses.redis_url, maxmemory_mb=limit, secrets=launch.secrets)
    log = config.run.dir / "logs" / "redis.log"
    hidden = SECRET_VARIABLES if launch.secrets else ()
    return ProcessSpec("redis", "redis", argv, log, Ready.PING, addresses.redis_url, {}, launch.restarts, hidden)


def _drain(section: str, given: set[str]) -> tuple[str, ...]:
    # The launcher stops all processes together: no other server would take over work in flight.
    return () if "drain_s" in given else (f"{section}.drain_s={DRAIN_S}",)


def _only_first(section: str, index: int, port: int) -> tuple[str, ...]:
    return (f"{section}.port=0",) if port and index > 1 else ()  # only one process can listen there
