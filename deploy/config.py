"""The whole configuration of a run: the sections of every service, and how the launcher starts them.

Only the services' `config` modules are imported, none of which imports a framework. The launcher reads the tree
once, expands `${NAME}/...` paths, chooses addresses, and writes the result as `resolved.yaml` into the run directory;
that file is what each process reads, and what a person can start further processes from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from learner.config.learner import LearnerSettings
from protocol.errors import UserError
from protocol.redaction import is_secret_name
from protocol.runtime.config import SettingsTree, read_tree, section
from protocol.settings import REDIS_URL_VARIABLE, RunSettings, Settings
from retriever.config import RetrieverSettings
from rollout_server.config import RolloutSettings
from rollout_server.node.config import NodeSettings

_VARIABLE = re.compile(r"^\$\{([A-Za-z_][A-Za-z0-9_]*)\}(?=/|$)")


class LaunchSettings(Settings):
    """What `foray up` starts, and how it watches over it."""

    engines: int = Field(default=1, ge=0)
    """Engine nodes. More can be added while the run goes on."""
    rollouts: int = Field(default=1, ge=0)
    """Rollout servers."""
    retrievers: int | None = Field(default=None, ge=0)
    """Retrievers. None: one, or none where `rollout.search` names others or searches elsewhere."""
    learner: bool = True
    """Whether to start the learner; without it `up` serves until it is stopped."""
    learner_ranks: int = Field(default=1, ge=1)
    """Ranks of the learner on this machine, started by torchrun; over several machines start it yourself."""
    redis: Literal["auto", "own", "configured"] = "auto"
    """auto: the configured URL if there is one, otherwise a Redis of our own. The others insist on one of the two."""
    redis_maxmemory_mb: int = Field(default=1024, ge=16)
    """Memory limit of our own Redis (MiB). `foray doctor` compares it with what the run may hold."""
    threads: int = Field(default=1, ge=1)
    """OMP_NUM_THREADS (and MKL, OpenBLAS) of every process."""
    restarts: int = Field(default=3, ge=0)
    """Times that an engine, a rollout server, a retriever or Redis is started again after it died."""
    restart_learner: int = Field(default=0, ge=0)
    """Times that the learner is started again after it died (it goes on from its checkpoint)."""
    ready_s: float = Field(default=180.0, gt=0)
    """Longest wait for a process to be ready."""
    shutdown_s: float = Field(default=20.0, gt=0)
    """Longest wait between SIGTERM and SIGKILL at the end."""
    secrets: Path | None = None
    """Directory that `foray init --secure` wrote: each process gets the secrets of its role and no others, and our own
    Redis its users. None: what the launcher's environment holds goes to all."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every process. No secrets here: this file is copied into the run directory."""
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands run one after the other before anything is started, only where `run.model` does not exist yet.
    `{python}`, `{model}` and `{config}` (the resolved file) are replaced."""

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        secret = sorted(name for name in env if is_secret_name(name) or name == REDIS_URL_VARIABLE)
        if secret:
            raise ValueError(f"{secret[0]} looks like a secret: export it before `foray up`, every process inherits it")
        return env


class RunConfig(Settings):
    """The tree: one section a service, `run` for what they share, `launch` for the launcher, `demo` for the demo."""

    run: RunSettings = RunSettings()
    """What all processes must agree on."""
    rollout: RolloutSettings = RolloutSettings()
    """Rollout servers."""
    engine: NodeSettings = NodeSettings()
    """Engine nodes."""
    learner: LearnerSettings = LearnerSettings()
    """The learner."""
    retriever: RetrieverSettings = RetrieverSettings()
    """Retrievers."""
    launch: LaunchSettings = LaunchSettings()
    """The launcher."""
    demo: dict[str, Any] = Field(default_factory=dict)
    """Free for the demo."""

    @property
    def num_retrievers(self) -> int:
        """Retrievers to start."""
        if self.launch.retrievers is not None:
            return self.launch.retrievers
        search = self.rollout.search
        return 1 if search.type == "http" and "urls" not in search.model_fields_set else 0

    def to_yaml(self) -> str:
        """Return every setting with its value, defaults included, as a file that each process can read."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


_SECTIONS: dict[str, type[Settings]] = {
    "run": RunSettings,
    "rollout": RolloutSettings,
    "engine": NodeSettings,
    "learner": LearnerSettings,
    "retriever": RetrieverSettings,
    "launch": LaunchSettings,
}


def load_config(path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> RunConfig:
    """Return the configuration in `path` with `overrides`; raises UserError that names every wrong key."""
    return from_tree(expand(read_tree(path, overrides), environ))


def from_tree(tree: Mapping[str, Any]) -> RunConfig:
    """Return the tree as a RunConfig; fields that the tree does not name stay out of `model_fields_set`.

    Raises UserError with what is wrong in all sections.
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


def expand(tree: Mapping[str, Any], environ: Mapping[str, str]) -> SettingsTree:
    """The tree with every text that begins with `${NAME}/` (or is `${NAME}`) read as a path below that directory.

    Nothing else is replaced: a `$` in a prompt or a pattern is left alone. Raises UserError for an unset variable.
    """

    def walk(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return {name: walk(item, f"{where}.{name}" if where else str(name)) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item, f"{where}.{index}") for index, item in enumerate(value)]
        found = _VARIABLE.match(value) if isinstance(value, str) else None
        if found is None:
            return value
        if not environ.get(found[1]):
            raise UserError(
                f"{where} = {value}: the environment variable {found[1]} is not set",
                todo=f"export {found[1]}=/the/directory, or override {where}=/the/path",
            )
        return environ[found[1]] + value[found.end() :]

    return SettingsTree(walk(tree, ""), tree.spelt if isinstance(tree, SettingsTree) else {})
