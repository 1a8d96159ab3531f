"""The processes of a run: a pure function from the configuration to process specs.

It starts nothing, chooses no port and reads no file, so `foray up --dry-run` works without the packages of the
processes. Every process reads the same resolved file; overrides distinguish them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from deploy.config import RunConfig
from deploy.launcher.redis_server import redis_argv
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
    ENGINE = "registered in Redis as ready"
    RUNNING = "running"


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    name      unique in the run, and the name of its log file
    kind      one of KINDS
    argv      command line
    env       environment variables added to the launcher's
    hidden    environment variables of the launcher that this process does not inherit
    log       file for its stdout and stderr
    ready     readiness condition; `url` if it needs an address
    restarts  maximum number of restarts; 0: its exit ends the run
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


@dataclass(frozen=True)
class Addresses:
    """Addresses of the processes. Chosen once per run, so that a restarted process keeps its address.

    redis_url   the configured Redis, or the one that the launcher starts
    server      program of the Redis that the launcher starts, None for a configured one
    retrievers  base URL of each retriever
    rollouts    base URL of each rollout server
    learner     base URL of the learner's metrics, "" without them
    """

    redis_url: str
    server: Path | None
    retrievers: tuple[str, ...]
    rollouts: tuple[str, ...]
    learner: str = ""


def plan(
    config: RunConfig,
    addresses: Addresses,
    *,
    python: str,
    resolved: Path,
    read_secrets: bool = True,
    takeover: bool = False,
) -> list[ProcessSpec]:
    """Return the processes of `config` in start order; `resolved` is the YAML file that each of them reads.

    With `launch.secrets` each process gets the variables in the file of its role, unless `read_secrets` is False (to
    show the plan only). Raises UserError if such a file is missing.
    """
    launch, run = config.launch, config.run
    threads = {name: str(launch.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    env = {**threads, "PYTHONUNBUFFERED": "1", **({} if launch.secrets else {REDIS_URL_VARIABLE: addresses.redis_url})}
    hidden = SECRET_VARIABLES if launch.secrets else ()

    def process(name: str, kind: str, module: str, *overrides: str, ready: Ready, url: str = "") -> ProcessSpec:
        restarts = launch.restart_learner if kind == "learner" else launch.restarts
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.learner_ranks))
        ranked = torchrun if kind == "learner" and launch.learner_ranks > 1 else ()
        argv = (python, *ranked, "-m", module, "--config", str(resolved), *overrides)
        own = env_of(launch.secrets, kind, addresses.redis_url) if launch.secrets and read_secrets else {}
        log = run.dir / "logs" / f"{name}.log"
        return ProcessSpec(name, kind, argv, log, ready, url, {**env, **own, **launch.env}, restarts, hidden)

    specs: list[ProcessSpec] = [_redis(config, addresses)] if addresses.server is not None else []
    for index, url in enumerate(addresses.retrievers, start=1):
        port = f"retriever.port={_port(url)}"
        specs.append(process(f"retriever-{index}", "retriever", "retriever", port, ready=Ready.HTTP, url=url))
    for index in range(1, launch.engines + 1):
        name = f"engine-{index}"
        extra = (f"engine.id={name}", *_drain("engine", config.engine.model_fields_set))
        specs.append(process(name, "engine", "rollout_server.node", *extra, ready=Ready.ENGINE))
    for index, url in enumerate(addresses.rollouts, start=1):
        name = f"rollout-{index}"
        extra = (
            f"rollout.id={name}",
            f"rollout.port={_port(url)}",
            *_drain("rollout", config.rollout.model_fields_set),
        )
        # not /ready: that needs a published version, and evaluations may precede the learner
        specs.append(process(name, "rollout", "rollout_server", *extra, ready=Ready.ALIVE, url=url))
    if launch.learner:
        extra = ("--takeover",) if takeover else ()
        if addresses.learner:
            extra = (*extra, f"learner.metrics_port={_port(addresses.learner)}")
        specs.append(process("learner", "learner", "learner", *extra, ready=Ready.RUNNING, url=addresses.learner))
    return specs


def _redis(config: RunConfig, addresses: Addresses) -> ProcessSpec:
    directory = (config.run.dir / "redis").absolute()
    assert addresses.server is not None
    launch = config.launch
    acl = launch.secrets / "users.acl" if launch.secrets else None
    argv = redis_argv(addresses.server, directory, addresses.redis_url, maxmemory_mb=launch.redis_maxmemory_mb, acl=acl)
    log = config.run.dir / "logs" / "redis.log"
    hidden = SECRET_VARIABLES if launch.secrets else ()
    return ProcessSpec("redis", "redis", argv, log, Ready.PING, addresses.redis_url, {}, launch.restarts, hidden)


def _drain(section: str, given: set[str]) -> tuple[str, ...]:
    # The launcher stops all processes together: no other server would take over work in flight.
    return () if "drain_s" in given else (f"{section}.drain_s={DRAIN_S}",)


def _port(url: str) -> str:
    return url.rpartition(":")[2]
