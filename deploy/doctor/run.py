"""Checks of this machine and of a configuration: what would stop a run, or make it stall later. Nothing is changed.

Each check gives findings; a finding that is not `ok` says how to fix it, by a command where one does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from deploy.config import RunConfig
from deploy.doctor import access as doctor_access
from deploy.doctor import acl as doctor_acl
from deploy.doctor import data as doctor_data
from deploy.doctor import engine as doctor_engine
from deploy.doctor import machine as doctor_machine
from deploy.doctor import model as doctor_model
from deploy.doctor import redis as doctor_redis
from deploy.doctor.finding import Finding
from deploy.doctor.redis import memory_needed
from deploy.launcher.addresses import choose_redis
from deploy.secrets.acl import REDIS_ROLES
from deploy.secrets.env import redis_url_for
from protocol.errors import UserError

__all__ = ["Finding", "examine", "inputs", "memory_needed", "preflight"]


def examine(
    config: RunConfig | None,
    path: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """Return every finding: of this machine, and of `config` (read from `path`) where one is given."""
    found = [*doctor_machine.machine(), *doctor_machine.packages(config)]
    if config is None:
        return [*found, *doctor_redis.program()]
    return [*found, *doctor_machine.secrets(config, path), *_before_start(config, environ, clock)]


def preflight(config: RunConfig, *, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """What `foray up` looks at before it starts a process: all that could end the run later. Takes about a second."""
    found = [*doctor_machine.packages(config), *doctor_machine.secrets(config, None)]
    return [*found, *_before_start(config, environ, time.time)]


def inputs(config: RunConfig) -> list[Finding]:
    """Findings that rest on files, and so may be others once `launch.prepare` has run."""
    return [
        *doctor_data.files(config),
        *doctor_model.tokenizer(config),
        *doctor_model.teacher(config),
        *doctor_model.remote_code(config),
        *doctor_engine.engine(config),
        *doctor_engine.learner(config),
        *doctor_machine.disk(config),
    ]


def _before_start(config: RunConfig, environ: Mapping[str, str], clock: Callable[[], float]) -> Iterator[Finding]:
    try:
        yield from _redis(config, environ, clock)
    except UserError as error:
        yield Finding.of("redis", error)
    yield from doctor_access.binds(config, environ)
    yield doctor_machine.usable(config)
    yield from doctor_machine.ports(config)
    yield from doctor_machine.sandbox(config)
    yield from inputs(config)


def _redis(config: RunConfig, environ: Mapping[str, str], clock: Callable[[], float]) -> Iterator[Finding]:
    place = choose_redis(config, environ)
    if not place:
        yield from doctor_redis.program()
        limit = config.launch.redis_maxmemory_mb << 20
        yield doctor_redis.memory(memory_needed(config), limit, "launch.redis_maxmemory_mb")
        return
    secrets = config.launch.secrets
    url = redis_url_for(secrets, "viewer", place) if secrets else place
    found = list(doctor_redis.server(url, config, clock))
    yield from found
    if any(finding.check == "redis" and finding.verdict == "fail" for finding in found):
        return
    if secrets:
        for role in REDIS_ROLES:
            if role != "admin":
                yield from doctor_acl.user(redis_url_for(secrets, role, place), config.run.id, role)
    else:
        yield from doctor_acl.user(url, config.run.id)
    yield from doctor_model.fleet(url, config)
    if config.launch.learner:
        from deploy.doctor import (
            identity as doctor_identity,  # imports redis, as nothing else here does before it is needed
        )

        yield from doctor_identity.lineage(url, config)
