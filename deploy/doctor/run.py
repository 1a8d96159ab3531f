"""Run all checks of this machine and of a configuration: problems that would stop or stall a run. Read-only.

Each check yields findings. A finding that is not `ok` has a fix, a command if possible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.config import RunConfig
from deploy.doctor import access, acl, data, engine, gpu_host, machine, model, redis, speed
from deploy.doctor.finding import Finding
from deploy.hardware.host_memory import memory_needed
from deploy.hardware.speed import with_dtypes
from deploy.run.addresses import anchored, choose_redis
from deploy.run.run_dir import RECORD, RESOLVED, read_configuration
from deploy.secrets.acl import REDIS_ROLES
from deploy.secrets.env import redis_url_for
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.resume import require_resumable
from learner.data.questions import load_questions
from learner.data.sampler import Sampler
from protocol.errors import UserError
from protocol.runtime.lifecycle import memory_available

CHOSEN = {
    "run.steps",
    "run.date",
    "run.redis_url",
    "rollout.search.urls",
    "retriever.port",
    "launch.redis",
    "launch.retrievers",
}
"""Settings that each start may choose, or that users raise to go on."""


def examine(
    config: RunConfig | None,
    path: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """Return all findings about this machine, and about `config` (read from `path`) if given."""
    found = [*machine.machine(), *speed.machine(), *machine.packages(config)]
    if config is None:
        return [*found, *redis.program()]
    config = with_dtypes(config, environ)
    found += [*machine.secrets(config, path), *_before_start(config, environ, clock)]
    found += [*model.family(config), *engine.check_model(config)]
    return [*found, *model.auto_tokenizer(config), *model.agent(config), *data.lengths(config)]


def preflight(config: RunConfig, *, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return the findings that `foray up` needs before it starts a process. Takes about a second."""
    config = with_dtypes(config, environ)
    found = [*machine.system(), *machine.packages(config), *machine.secrets(config, None)]
    return [*found, *_before_start(config, environ, time.time)]


def inputs(config: RunConfig) -> list[Finding]:
    """Return the findings about files, which `launch.prepare` may change."""
    return [
        *data.files(config),
        *model.tokenizer(config),
        *model.teacher(config),
        *model.remote_code(config),
        *engine.engine(config),
        *engine.gpus(config),
        *gpu_host.gpu_host(config),
        *engine.learner(config),
        *speed.findings(config),
        *machine.disk(config),
        *machine.main_memory(config, memory_available()),
    ]


def _before_start(config: RunConfig, environ: Mapping[str, str], clock: Callable[[], float]) -> Iterator[Finding]:
    try:
        yield from _redis(config, environ, clock)
    except UserError as error:
        yield Finding.of("redis", error)
    yield from access.binds(config, environ)
    yield machine.usable(config)
    yield from machine.ports(config)
    yield from machine.sandbox(config)
    yield from inputs(config)
    if config.launch.learner:
        yield from resume(config)


def _redis(config: RunConfig, environ: Mapping[str, str], clock: Callable[[], float]) -> Iterator[Finding]:
    place = choose_redis(config, environ)
    if not place:
        yield from redis.program()
        limit = config.launch.redis_maxmemory_mb << 20
        yield redis.memory(memory_needed(config), limit, "launch.redis_maxmemory_mb")
        return
    secrets = config.launch.secrets
    url = redis_url_for(secrets, "viewer", place) if secrets else place
    found = list(redis.server(url, config, clock))
    yield from found
    if any(finding.check == "redis" and finding.verdict == "fail" for finding in found):
        return
    if secrets:
        for role in REDIS_ROLES:
            if role != "admin":
                yield from acl.user(redis_url_for(secrets, role, place), config.run.id, role)
    else:
        yield from acl.user(url, config.run.id)
    yield from model.fleet(url, config)
    if config.launch.learner:
        from deploy.doctor.identity import lineage  # imports redis, so only when needed

        yield from lineage(url, config)


def resume(config: RunConfig) -> Iterator[Finding]:
    """Yield a failure if the checkpoint in run.dir cannot be resumed, and name the settings that have changed."""
    try:
        facts = Checkpoints(config.run.checkpoint_dir, 1).manifest()
        if facts is not None:
            sampler = Sampler(load_questions(config.learner.questions), config.run.seed)
            require_resumable(facts, str(config.run.checkpoint_dir), config.run, config.learner, sampler.fingerprint)
    except OSError:
        return  # other checks report a run.dir that cannot be used
    except UserError as error:
        yield Finding.of("resume", error)
        return
    try:
        before = read_configuration(config.run.dir / RESOLVED, config.run.dir)
    except UserError:
        return  # the first start, or a damaged file: this start writes it again
    if not (config.run.dir / RECORD).exists():
        return  # `foray submit` wrote it: nothing has started
    if changed := list(_changes(before, anchored(with_dtypes(config)).model_dump(mode="json"))):
        fix = "nothing, if you changed them: they are used from now on"
        yield Finding("settings", "warn", f"changed since the last start: {', '.join(changed)}", fix)


def _changes(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield `name before -> now` for the values that differ; names that only one of the two knows are left out."""
    if name in CHOSEN:
        return
    if isinstance(before, dict) and isinstance(now, dict) and before.get("type") == now.get("type"):
        for key in (key for key in before if key in now):
            yield from _changes(before[key], now[key], f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} {before} -> {now}"
