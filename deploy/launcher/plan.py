"""Which processes a run is made of: a pure function from the configuration to process specs.

Nothing is started here, no port is chosen and no file is read, so `foray up --dry-run` can print the plan of a
machine that has none of it installed. Every process reads the same resolved file and is told apart by overrides.
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
"""Start order. A later kind may need an earlier one; engines, rollout servers and the learner find each other."""

DRAIN_S = 2


class Ready(StrEnum):
    """How it is judged that a process may be relied on."""

    PING = "answers PING"
    HTTP = "GET /ready is 200"
    ALIVE = "GET /health is 200"
    ENGINE = "registered in Redis as ready"
    RUNNING = "running"


@dataclass(frozen=True)
class ProcessSpec:
    """One process to be started.

    name      unique in the run, and the name of its log file
    kind      one of KINDS
    argv      command line
    env       variables on top of the launcher's own
    hidden    variables of the launcher's own that this process does not get
    log       file that takes its stdout and stderr
    ready     how readiness is judged, with `url` where that needs an address
    restarts  how often it is started again after it died; 0: its death ends the run
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
        """Plain values, for `--dry-run --json` and run.json. Secrets stay out, and a Redis URL, which may hold one."""
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
    """Where the processes listen. Chosen once a run: a restarted process comes back where the others look for it.

    redis_url   an outer Redis or our own
    server      program of our own Redis, None where an outer one is used
    retrievers  base URLs, one a retriever
    rollouts    base URLs, one a rollout server
    learner     base URL of the learner's metrics, "" without one
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
    """Return the processes of `config`, in start order; `resolved` is the YAML file that each of them will read.

    With `launch.secrets` each gets what is in the file of its role (UserError where one is missing), unless the plan is
    only to be shown (`read_secrets` False).
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
        # not /ready: that needs a published version, and evaluations may come before the learner
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
    # The launcher stops all processes together: work handed over at that time has no taker.
    return () if "drain_s" in given else (f"{section}.drain_s={DRAIN_S}",)


def _port(url: str) -> str:
    return url.rpartition(":")[2]
