"""Checks of this machine and of a configuration: what would stop a run, or make it stall later. Nothing is changed.

Each check gives findings; a finding that is not `ok` says how to mend it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deploy.config import RunConfig
from deploy.inputs import missing
from deploy.ports import is_free
from deploy.redis_child import check_server, connect, find_server
from protocol.errors import UserError
from protocol.settings import REDIS_URL_VARIABLE

Verdict = Literal["ok", "warn", "fail"]
NEEDED = {
    "protocol": ("pydantic", "msgpack", "numpy", "yaml", "redis"),
    "rollout server": ("aiohttp", "tokenizers", "prometheus_client"),
    "learner": ("torch", "transformers", "deepspeed", "safetensors"),
    "retriever": ("aiohttp", "bm25s", "faiss", "prometheus_client"),
}
EXTRAS = {"protocol": "", "rollout server": "[rollout]", "learner": "[learner]", "retriever": "[retriever]"}
BYTES_PER_TOKEN = 8 * 1.25
"""4 for the id, 4 for the log-prob, and what Redis adds: 266 kB packed are 331 kB there (measured)."""
SPARE_DISK = 2.0
"""The weights being written, and one more version, beyond what is kept."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `mend` is empty when it is in order."""

    check: str
    verdict: Verdict
    detail: str
    mend: str = ""


def examine(config: RunConfig | None) -> list[Finding]:
    """Every finding: of this machine, and of `config` where one is given."""
    found = [*_machine(), *_packages()]
    if config is None:
        return [*found, *_redis_program()]
    return [*found, *_redis(config), *_files(config), *_ports(config), *_disk(config)]


def _packages() -> Iterator[Finding]:
    for process, names in NEEDED.items():
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        if absent:
            # The processes may live in separate environments, so only what everything needs is a failure.
            verdict: Verdict = "fail" if process == "protocol" else "warn"
            mend = f"pip install 'foray{EXTRAS[process]}' in the environment that runs it"
            yield Finding(f"packages of the {process}", verdict, f"not installed: {', '.join(absent)}", mend)
        else:
            yield Finding(f"packages of the {process}", "ok", ", ".join(names))


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding("machine", "ok", f"Python {python}, {cores} cores, {memory:.0f} GiB of memory")


def _redis_program() -> Iterator[Finding]:
    try:
        server = find_server()
    except UserError as error:
        yield Finding("redis", "fail", f"{error.what}: {error.why}", error.todo)
    else:
        yield Finding("redis", "ok", f"{server.path} {server.version} ({server.origin})")


def _redis(config: RunConfig) -> Iterator[Finding]:
    url = config.run.redis_url or os.environ.get(REDIS_URL_VARIABLE, "")
    needed = memory_needed(config)
    if not url or config.launch.redis == "own":
        yield from _redis_program()
        yield _memory(needed, config.launch.redis_maxmemory_mb << 20, "launch.redis_maxmemory_mb")
        return
    try:
        yield Finding("redis", "ok", check_server(url))
    except UserError as error:
        yield Finding("redis", "fail", f"{error.what}: {error.why}", error.todo)
        return
    client = connect(url)
    try:
        memory = client.info("memory")
    finally:
        client.close()
    policy = str(memory.get("maxmemory_policy", "?"))
    if policy == "noeviction":
        yield Finding("redis policy", "ok", policy)
    else:
        mend = "redis-cli CONFIG SET maxmemory-policy noeviction"
        yield Finding("redis policy", "fail", f"{policy}: a full Redis would throw work in flight away", mend)
    yield _memory(needed, int(memory.get("maxmemory", 0)), "maxmemory of the Redis")


def memory_needed(config: RunConfig) -> int:
    """Most bytes of trajectory groups in Redis: (max_lag + 1 + K) * B groups, K the steps between checkpoints.

    Each group is taken at its longest: G trajectories of `max_context` tokens.
    """
    groups = (config.run.max_lag + 1 + config.learner.checkpoint_every) * config.run.groups_per_step
    return int(groups * config.run.group_size * config.rollout.episode.max_context * BYTES_PER_TOKEN)


def _memory(needed: int, limit: int, setting: str) -> Finding:
    detail = f"at most {needed / 2**20:.0f} MiB of groups in flight and until the next checkpoint"
    if limit == 0:
        return Finding(
            "redis memory", "warn", f"{detail}; no limit is set", "set maxmemory, so that it refuses in time"
        )
    detail += f", the limit is {limit / 2**20:.0f} MiB"
    if needed > limit:
        mend = f"raise {setting}, or lower learner.checkpoint_every (a full Redis pauses the rollouts, nothing is lost)"
        return Finding("redis memory", "warn", detail, mend)
    return Finding("redis memory", "ok", detail)


def _files(config: RunConfig) -> Iterator[Finding]:
    gaps = missing(config)
    for gap in gaps:
        if gap.setting == "run.model" and config.launch.prepare:
            yield Finding("run.model", "ok", f"{gap.path} will be made by launch.prepare")
        else:
            yield Finding(gap.setting, "fail", f"{gap.path} is not there", gap.todo)
    if not gaps:
        yield Finding("files", "ok", "model, corpus and questions are there")


def _ports(config: RunConfig) -> Iterator[Finding]:
    wanted = {"rollout.port": (config.rollout.host, config.rollout.port)}
    if config.num_retrievers and "port" in config.retriever.model_fields_set:
        wanted["retriever.port"] = (config.retriever.host, config.retriever.port)
    if "port" in config.engine.model_fields_set:
        wanted["engine.port"] = (config.engine.host, config.engine.port)
    taken = [f"{name} = {port}" for name, (host, port) in wanted.items() if port and not is_free(host, port)]
    if taken:
        mend = "stop what listens there, or take another port (0: a free one)"
        yield Finding("ports", "fail", f"taken: {', '.join(taken)}", mend)
    else:
        yield Finding("ports", "ok", "free")


def _disk(config: RunConfig) -> Iterator[Finding]:
    place = config.run.dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    weights = _size(config.run.model)
    # float32 weights and two moments in each checkpoint, and the one that is being written
    kept = config.learner.publish.keep_versions + SPARE_DISK + 3 * (config.learner.keep_checkpoints + 1)
    needed = int(weights * kept) + (1 << 28)
    detail = (
        f"{free / 2**30:.1f} GiB free at {place}, about {needed / 2**30:.1f} GiB needed for weights and checkpoints"
    )
    if free < needed:
        yield Finding("disk", "fail", detail, "free some, move run.dir, or lower learner.keep_checkpoints")
    else:
        yield Finding("disk", "ok", detail)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
