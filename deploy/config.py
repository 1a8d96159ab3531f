"""The configuration of a run: the sections of all services, and how the launcher starts them.

Only the services' `config` modules are imported, none of which imports a framework. The launcher reads the tree
once, expands `${NAME}/...` paths, chooses addresses, and writes the result to `resolved.yaml` in the run directory.
Each process reads that file, and users can start further processes from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from learner.config.learner import LearnerSettings
from learner.config.sft import SftSettings
from protocol.errors import UserError
from protocol.redaction import is_secret_name
from protocol.runtime.config import expand, read_tree, section
from protocol.runtime.http.auth import is_loopback
from protocol.settings import REDIS_URL_VARIABLE, RunSettings, Settings
from retriever.config import RetrieverSettings
from rollout_server.config import RolloutSettings
from rollout_server.node.config import NodeSettings

Index = Annotated[int, Field(ge=0)]
Hardware = Literal["", "1x24gb", "1xh200", "4xa100-40", "8xh100", "2x8xh100", "8x8xh100"]
"""Profiles of `deploy.hardware.inventory.HARDWARE`, "" for none."""


class GpuSettings(Settings):
    """GPUs of the processes that `foray up` starts, counted from 0 among those visible to it (CUDA_VISIBLE_DEVICES).

    Without lists they are assigned in order: engines, learner, retrievers. Every process sees only its own.
    """

    engines: tuple[Index, ...] = ()
    """GPUs of the engines, in order, those of `launch.eval_engines` last; empty: assigned."""
    learner: tuple[Index, ...] = ()
    """GPUs of the learner's ranks; empty: assigned."""
    retrievers: tuple[Index, ...] = ()
    """GPUs of retrievers whose index or encoder uses one; empty: assigned. An encoder with `device: auto` gets a GPU
    only if one is left."""
    others: tuple[Index, ...] = ()
    """GPUs to leave free for services that `up` does not start, such as a judge or a reward model."""
    share: bool = False
    """Engines and learner may share a GPU if their memory fits together. Set `--max-total-tokens` in engine.kind.args:
    without it SGLang takes most of the GPU."""


class SlurmSettings(Settings):
    """Jobs that `foray submit` writes (docs/clusters.md)."""

    template: Path | None = None
    """Your copy of the script of the jobs, with partition, account, time limits and modules of your site. null: that of
    Foray."""
    nodes: int = Field(default=1, ge=1)
    """Nodes of the core job: the learner runs `learner_ranks` on each; Redis, rollout servers and retrievers run on
    the first."""


class AutoscaleSettings(Settings):
    """Number of engines that follows the load: `foray up` starts engines while the learner waits for them, and drains
    one while more than one is idle (docs/clusters.md)."""

    min: int = Field(default=1, ge=1)
    """Minimum number of engines."""
    max: int = Field(default=0, ge=0)
    """Maximum number of engines; GPUs are reserved for as many. 0: `launch.engines` and `foray scale` decide."""

    @model_validator(mode="after")
    def _ordered(self) -> AutoscaleSettings:
        if 0 < self.max < self.min:
            raise ValueError(f"max is {self.max}, below min, which is {self.min}")
        return self


class LaunchSettings(Settings):
    """Processes that `foray up` starts, and how it supervises them."""

    engines: int = Field(default=1, ge=0)
    """Number of engine nodes. More can join while the run is in progress."""
    autoscale: AutoscaleSettings = AutoscaleSettings()
    """Number of engines by load instead, beginning with `engines`."""
    eval_engines: int = Field(default=0, ge=0)
    """Number of further engine nodes, with `engine.role=eval`: they only serve evaluations, so that neither new weights
    nor training wait for one. 0: evaluations share the other engines."""
    rollouts: int = Field(default=1, ge=0)
    """Number of rollout servers."""
    retrievers: int | None = Field(default=None, ge=0)
    """Number of retrievers. null: one, or none if `rollout.search` names other retrievers or another backend."""
    learner: bool = True
    """Start the learner. Without it, `up` serves the model until it is stopped."""
    learner_prefix: tuple[str, ...] = ()
    """Command before that of the learner, which starts its ranks: [srun, ...]. Empty: `foray up` starts each."""
    learner_ranks: int = Field(default=1, ge=1)
    """Number of learner ranks, each a process with one GPU. All are restarted together."""
    backend: Literal["local", "ray", "slurm"] = "local"
    """What starts the processes: this machine, the Ray cluster that it is a node of, or jobs of Slurm, which `foray up`
    then submits as `foray submit` does (docs/clusters.md)."""
    redis: Literal["auto", "own", "configured"] = "auto"
    """auto: the configured URL if there is one, else start a Redis. The other values require one of the two."""
    redis_host: str = ""
    """Address or name of this host at which the Redis that `up` starts serves other hosts, with the users, tokens and
    TLS of `launch.secrets`. `run.dir/redis.url` then has its URL. Empty: it serves this machine only."""
    redis_maxmemory_mb: int = Field(default=1024, ge=16)
    """Memory limit of the Redis that `up` starts, in MiB. `foray doctor` compares it with the needs of the run."""
    threads: int = Field(default=1, ge=1)
    """OMP_NUM_THREADS (also for MKL and OpenBLAS) of every process."""
    gpus: GpuSettings = GpuSettings()
    """GPUs per process. Without an NVIDIA GPU this has no effect."""
    hardware: Hardware = ""
    """Hardware profile that `foray init --hardware` wrote this file for (docs/hardware.md). `foray up` refuses to start
    it without GPUs, and `--dry-run` shows its placement also on a machine without them."""
    device_price: float = Field(default=0.0, ge=0)
    """Price of one device (a GPU, or a process that computes on CPUs) per hour, in any currency; the dashboard shows
    the cost of the run. 0: unknown."""
    restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts within an hour, for each engine, rollout server, retriever and Redis."""
    restart_learner: int = Field(default=3, ge=0)
    """Maximum number of restarts of the learner within an hour: it resumes from its checkpoint. Not restarted after an
    error that you must fix, without a training signal, or if another learner took over (exit codes 2, 65, 75)."""
    ready_s: float = Field(default=180.0, gt=0)
    """Time for a process to become ready, in seconds. It starts again whenever the memory of its processes has grown:
    what still loads is not given up."""
    secrets: Path | None = None
    """Directory that `foray init --secure` wrote. Each process gets only the secrets of its role, and the Redis that
    `up` starts gets its users. null: all processes inherit the launcher's environment."""
    slurm: SlurmSettings = SlurmSettings()
    """Jobs of `foray submit`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for every process. No secrets: this file is copied to the run directory."""
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands to run, in order, before any process starts; only if `run.model` does not exist. `{python}`, `{model}`
    and `{config}` (the resolved file) are replaced."""

    @model_validator(mode="after")
    def _redis_has_users(self) -> LaunchSettings:
        if self.redis_host and not is_loopback(self.redis_host) and self.secrets is None:
            raise ValueError(
                f"redis_host = {self.redis_host} would expose Redis to the network without users: "
                "`foray init run.yaml --secure` makes them, and launch.secrets names their directory"
            )
        return self

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        secret = sorted(name for name in env if is_secret_name(name) or name == REDIS_URL_VARIABLE)
        if secret:
            raise ValueError(f"{secret[0]} looks like a secret: export it before `foray up`; every process inherits it")
        return env


class RunConfig(Settings):
    """All settings: one section per service, `run` (shared), `launch` (launcher) and `demo` (demo)."""

    run: RunSettings = RunSettings()
    """Settings that all processes share."""
    rollout: RolloutSettings = RolloutSettings()
    """Rollout servers."""
    engine: NodeSettings = NodeSettings()
    """Engine nodes."""
    learner: LearnerSettings = LearnerSettings()
    """The learner."""
    retriever: RetrieverSettings = RetrieverSettings()
    """Retrievers."""
    sft: SftSettings = SftSettings()
    """`foray sft`: supervised training before the run."""
    launch: LaunchSettings = LaunchSettings()
    """The launcher."""
    demo: dict[str, Any] = Field(default_factory=dict)
    """Used by the demo."""

    @property
    def engine_roles(self) -> dict[str, str]:
        """Return the role of each engine node to start, by its name, in start order."""
        names = [(f"engine-{i}", self.engine.role) for i in range(1, self.launch.engines + 1)]
        return dict([*names, *((f"eval-engine-{i}", "eval") for i in range(1, self.launch.eval_engines + 1))])

    @property
    def num_retrievers(self) -> int:
        """Return the number of retrievers to start."""
        if self.launch.retrievers is not None:
            return self.launch.retrievers
        search = self.rollout.search
        return 1 if search.type == "http" and not search.urls else 0

    def to_yaml(self) -> str:
        """Return every setting with its value, including defaults, as a file that each process can read."""
        tree = self.model_dump(mode="json")
        if self.retriever.index_dir is not None:
            # a built index knows its corpus and settings, which a written default would contradict
            for name in {"index", "corpus"} - self.retriever.model_fields_set:
                del tree["retriever"][name]
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


_SECTIONS: dict[str, type[Settings]] = {
    "run": RunSettings,
    "rollout": RolloutSettings,
    "engine": NodeSettings,
    "learner": LearnerSettings,
    "retriever": RetrieverSettings,
    "sft": SftSettings,
    "launch": LaunchSettings,
}


def load_config(
    path: Path | str | None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> RunConfig:
    """Return the configuration in `path` with `overrides`. Raises UserError that names every wrong key.

    path       YAML file; None: defaults
    overrides  settings, e.g. ["run.steps=20"]
    environ    variables for `${NAME}/` at the beginning of a path
    """
    return from_tree(expand(read_tree(None if path is None else Path(path), overrides), environ))


def from_tree(tree: Mapping[str, Any]) -> RunConfig:
    """Return the tree as a RunConfig; fields that the tree does not set stay out of `model_fields_set`.

    Raises UserError with the errors of all sections.
    """
    given: dict[str, Any] = {"demo": tree.get("demo") or {}}
    wrong: list[str] = []
    for name, kind in _SECTIONS.items():
        try:
            given[name] = section(tree, name, kind)
        except UserError as error:
            wrong.append(error.what)
    if wrong:
        raise UserError("\n       ".join(wrong))
    return RunConfig.model_construct(**given)
