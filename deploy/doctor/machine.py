"""This machine: what is installed, which ports are taken and by whom, whether the disk holds the checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy.config import RunConfig
from deploy.doctor.finding import Finding, Verdict
from protocol.errors import UserError
from protocol.runtime.net import is_free, port_owner
from rollout_server.tools.python import PythonSettings, sandbox_for
from rollout_server.tools.sandbox.base import SandboxError

NEEDED = {
    "protocol": ("pydantic", "msgpack", "numpy", "yaml", "redis"),
    "rollout server": ("aiohttp", "tokenizers", "prometheus_client"),
    "learner": ("torch", "transformers", "deepspeed", "safetensors"),
    "retriever": ("aiohttp", "bm25s", "faiss", "prometheus_client"),
}
EXTRAS = {"protocol": "", "rollout server": "[rollout]", "learner": "[learner]", "retriever": "[retriever]"}
SPARE_DISK = 2.0
"""The weights being written, and one more version, beyond what is kept."""


def packages(config: RunConfig | None = None) -> Iterator[Finding]:
    """Check which processes can run in this environment, and so whether those that `config` starts here can."""
    launch = config.launch if config is not None else None
    starts = {"protocol": True}
    if launch is not None:
        starts |= {"learner": launch.learner, "rollout server": launch.rollouts + launch.engines > 0}
    for process, names in NEEDED.items():
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        if absent:
            # The processes may live in separate environments: only what is started here must be in this one.
            verdict: Verdict = "fail" if starts.get(process) else "warn"
            todo = f"pip install 'foray{EXTRAS[process]}' in the environment that runs it"
            yield Finding(f"packages of the {process}", verdict, f"not installed: {', '.join(absent)}", todo)
        else:
            yield Finding(f"packages of the {process}", "ok", ", ".join(names))


def machine() -> Iterator[Finding]:
    """Describe this machine, for a bug report."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding("machine", "ok", f"Python {python}, {cores} cores, {memory:.0f} GiB of memory")


def usable(config: RunConfig) -> Finding:
    """Return whether the run directory can be made and written: tried beside it, with a directory that goes at once."""
    wanted = config.run.dir.absolute()
    place = _nearest(wanted)
    todo = "run.dir=DIR, a directory that you may write to"
    if not place.is_dir():
        return Finding("run.dir", "fail", f"{config.run.dir} cannot be used: {place} is no directory", todo)
    try:
        with tempfile.TemporaryDirectory(prefix=".foray-", dir=place):
            pass
    except OSError as error:
        detail = f"{config.run.dir} cannot be used: {place} cannot be written to"
        return Finding("run.dir", "fail", detail, todo, error.strerror or str(error))
    return Finding("run.dir", "ok", f"{config.run.dir} can be written to")


def _nearest(path: Path) -> Path:
    """`path`, or the nearest one above it that exists."""
    while not os.path.exists(path):
        path = path.parent
    return path


def ports(config: RunConfig) -> Iterator[Finding]:
    """Ports that were asked for, with who holds those that are taken."""
    wanted = {}
    if config.launch.rollouts:
        wanted["rollout.port"] = (config.rollout.host, config.rollout.port)
    if config.num_retrievers and "port" in config.retriever.model_fields_set:
        wanted["retriever.port"] = (config.retriever.host, config.retriever.port)
    if config.launch.engines and "port" in config.engine.model_fields_set:
        wanted["engine.port"] = (config.engine.host, config.engine.port)
    if config.launch.learner:
        wanted["learner.metrics_port"] = (config.learner.metrics_host, config.learner.metrics_port or 0)
    taken = {name: (host, port) for name, (host, port) in wanted.items() if port and not is_free(host, port)}
    if not taken:
        yield Finding("ports", "ok", "free")
        return
    busy, fixes = [], []
    for name, (host, port) in taken.items():
        found = port_owner(port)
        busy.append(f"{name} = {port}" + (f" by process {found.pid} ({found.name})" if found else f" on {host}"))
        fixes.append(
            (f"kill {found.pid}, or " if found else "stop what listens there, or ") + f"{name}=0 (a free port)"
        )
    yield Finding("ports", "fail", f"taken: {', '.join(busy)}", "; ".join(fixes))


def disk(config: RunConfig) -> Iterator[Finding]:
    """Room for the checkpoints that are kept, the one being written, and the published versions."""
    weights = sum(path.stat().st_size for path in config.run.model.glob("*.safetensors"))
    if not weights or not config.launch.learner:
        return  # the model's size is not known, or the learner writes on another host
    place = _nearest(config.run.dir.absolute())
    free = shutil.disk_usage(place).free
    kept = config.learner.keep_checkpoints
    publish = config.learner.publish
    copies = 0 if publish.type == "adapter" else publish.keep_versions + SPARE_DISK
    if not config.learner.model.lora.rank:  # float32 weights and two moments in each checkpoint; adapters are small
        copies += 3 * (kept + 1)
    held = sum(_size(path) for path in (config.run.weights_dir, config.run.checkpoint_dir))
    needed = max(int(weights * copies) - held, 0) + (1 << 28)
    detail = f"{_gib(free)} free at {place}, about {_gib(needed)} needed for weights and {kept} + 1 checkpoints"
    if free < needed:
        todo = f"free {_gib(needed - free)}, move run.dir, or lower learner.keep_checkpoints (now {kept})"
        yield Finding("disk", "fail", detail, todo)
    else:
        yield Finding("disk", "ok", detail)


def sandbox(config: RunConfig) -> Iterator[Finding]:
    """Check that programs of the tool `python` can be run isolated, by running one."""
    for settings in config.rollout.episode.tools if config.launch.rollouts else ():
        if isinstance(settings, PythonSettings):
            try:
                output = asyncio.run(_run_program(settings))
            except UserError as error:
                yield Finding.of("tool python", error)
            except SandboxError as error:
                todo = (
                    "start the sandbox service, correct `sandbox.url`, or leave the tool out of rollout.episode.tools"
                )
                yield Finding("tool python", "fail", "the sandbox runs no program", todo, str(error))
            else:
                yield Finding(
                    "tool python", "ok", f"a sandbox of type {settings.sandbox.type} computes 6 * 7 = {output}"
                )


async def _run_program(settings: PythonSettings) -> str:
    box = sandbox_for(settings)
    try:
        return (await box.run("print(6 * 7)")).stdout.decode("utf-8", "replace").strip()[:40]
    finally:
        await box.close()


def secrets(config: RunConfig, path: Path | None) -> Iterator[Finding]:
    """Whether files with secrets in them are for their owner only. `path`: the configuration file, if there is one."""
    directory = config.launch.secrets
    if directory is not None and directory.is_dir():
        open_ = [p for p in (directory, *sorted(directory.iterdir())) if p.stat().st_mode & 0o077]
        if open_:
            names = ", ".join(str(p) for p in open_[:4]) + (" ..." if len(open_) > 4 else "")
            yield Finding("secrets", "fail", f"others may read {names}", f"chmod -R go= {directory}")
        else:
            yield Finding("secrets", "ok", f"{directory} is for its owner only")
    elif directory is not None:
        todo = "foray init run.yaml --secure, or leave launch.secrets out"
        yield Finding("secrets", "fail", f"launch.secrets = {directory} is no directory", todo)
    from protocol.runtime.redis.url import parse_redis_url

    if config.run.redis_url and parse_redis_url(config.run.redis_url).password:
        where = f" in {path}" if path else ""
        todo = "export FORAY_REDIS_URL=... in the environment of each process, and leave run.redis_url empty"
        yield Finding(
            "redis password", "warn", f"run.redis_url{where} holds a password, and is copied to run.dir", todo
        )


def _size(directory: Path) -> int:
    """Return the bytes of all files. One that a learner deletes meanwhile counts as none."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"
