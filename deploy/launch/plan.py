"""The processes of a run: a pure function from the configuration to process specs.

It starts nothing, chooses no port and reads no file (of the model it takes the size), so `foray up --dry-run` works
without the packages of the processes. Every process reads the same resolved file; overrides distinguish them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from deploy.config import RunConfig
from deploy.hardware.assign import NO_GPUS, NOWHERE, Place, Placement
from deploy.hardware.inventory import VISIBLE
from deploy.run.addresses import Addresses
from deploy.run.redis_server import redis_argv
from deploy.secrets.env import SECRET_VARIABLES, env_of
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


HOST = "{host}"
"""In argv: the address of the host that the process runs on, which a restart may change."""
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
    place     what it needs, and its host and GPUs
    group     processes that are started and restarted together, with ranks from 0; default: this one alone
    env       environment variables added to the launcher's
    env_secret  more of them, which are shown and written nowhere
    hidden    environment variables of the launcher that this process does not inherit
    log       file for its stdout and stderr
    ready     readiness condition; `url` if that needs an address
    restarts  maximum number of restarts within an hour; 0: its exit ends the run
    stop_s    seconds that it may need after SIGTERM, beyond SHUTDOWN_S
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
    place: Place = NOWHERE
    group: str = ""
    rank: int = 0
    env_secret: dict[str, str] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `--dry-run --json` and run.json, without `env_secret`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "argv": list(self.argv),
            "env": self.env,
            "host": self.place.host,
            "gpus": [gpu.id for gpu in self.place.gpus],
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


def _threads(config: RunConfig, kind: str, cores: int) -> dict[str, str]:
    threads = learner_threads(config, cores) if kind == "learner" else config.launch.threads
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


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
    url_secret = {} if launch.secrets else {REDIS_URL_VARIABLE: addresses.redis_url}
    # which GPUs `launch.env` shows was decided by the placement
    extra_env = {name: value for name, value in launch.env.items() if name != VISIBLE or not placement.gpus}

    def process(name: str, kind: str, module: str, *overrides: str, ready: Ready) -> ProcessSpec:
        restarts = launch.restart_learner if kind == "learner" else launch.restarts
        prefix = launch.learner_prefix if kind == "learner" else ()
        argv = (*prefix, python, "-m", module, "--config", str(resolved), *overrides)
        own = env_of(launch.secrets, kind, addresses.redis_url) if launch.secrets and read_secrets else {}
        log = run.dir / "logs" / f"{name}.log"
        stop_s = checkpoint_s(config) if kind == "learner" else 0.0
        place = placement.of(name, kind)
        env = {**_threads(config, kind, cores), "PYTHONUNBUFFERED": "1", **extra_env}
        env |= {} if prefix else place.environment  # with a prefix the scheduler shows each rank its GPUs
        hidden = SECRET_VARIABLES if launch.secrets else ()
        known = (name, kind, argv, log, ready, "", env, restarts, hidden, stop_s, place)
        return ProcessSpec(*known, group=name, env_secret=url_secret | own)

    specs: list[ProcessSpec] = [_redis(config, addresses, placement)] if addresses.server is not None else []
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
        learner = process("learner", "learner", "learner", *extra, ready=Ready.RUNNING)
        ranks = 1 if launch.learner_prefix else launch.learner_ranks
        specs += _ranks(learner, ranks, placement) if ranks > 1 else [learner]
    return specs


def _ranks(learner: ProcessSpec, size: int, placement: Placement) -> Iterator[ProcessSpec]:
    """Yield the processes of a learner with several ranks. The first has the name and the log of the learner."""
    for rank in range(size):
        place = placement.of(learner.name, learner.kind, rank, size)
        # each rank sees one GPU, its own
        ranked = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
        spec = replace(learner, rank=rank, place=place, env=learner.env | place.environment | ranked)
        name = f"{learner.name}-rank-{rank}"
        yield replace(spec, name=name, log=spec.log.with_name(f"{name}.log")) if rank else spec


def learner_threads(config: RunConfig, cores: int) -> int:
    """Return the threads of a learner rank: an offloaded optimizer updates on the CPU, so ranks divide the cores."""
    launch = config.launch
    divided = cores // launch.learner_ranks if config.learner.engine.offload_optimizer else 0
    return max(launch.threads, divided)


def _redis(config: RunConfig, addresses: Addresses, placement: Placement) -> ProcessSpec:
    directory = (config.run.dir / "redis").absolute()
    assert addresses.server is not None
    launch = config.launch
    limit = launch.redis_maxmemory_mb
    argv = redis_argv(addresses.server, directory, addresses.redis_url, maxmemory_mb=limit, secrets=launch.secrets)
    log = config.run.dir / "logs" / "redis.log"
    hidden = SECRET_VARIABLES if launch.secrets else ()
    place = placement.of("redis", "redis")
    return ProcessSpec(
        *("redis", "redis", argv, log, Ready.PING, addresses.redis_url, {}, launch.restarts, hidden), place=place
    )


def _drain(section: str, given: set[str]) -> tuple[str, ...]:
    # The launcher stops all processes together: no other server would take over work in flight.
    return () if "drain_s" in given else (f"{section}.drain_s={DRAIN_S}",)


def _only_first(section: str, index: int, port: int) -> tuple[str, ...]:
    return (f"{section}.port=0",) if port and index > 1 else ()  # only one process can listen there
