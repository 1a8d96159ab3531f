"""Check this machine: installed packages, ports, disk space for checkpoints, sandbox, permissions of secrets."""

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
from deploy.hardware.host_memory import memory_parts
from learner.config.learner import KEEP_VERSIONS
from protocol.errors import UserError
from protocol.runtime.http.auth import LOOPBACK
from protocol.runtime.lifecycle import require_linux
from protocol.runtime.net import is_free, port_owner
from protocol.runtime.number_format import stored_bytes
from rollout_server.tools.python import PythonSettings, sandbox_for
from rollout_server.tools.sandbox.base import SandboxError

NEEDED = {
    "protocol": ("pydantic", "msgpack", "msgspec", "isal", "xxhash", "numpy", "yaml", "redis"),
    "rollout server": ("aiohttp", "tokenizers", "prometheus_client"),
    "learner": ("torch", "transformers", "deepspeed", "safetensors"),
    "retriever": ("aiohttp", "bm25s", "faiss", "prometheus_client"),
}
EXTRAS = {"protocol": "", "rollout server": "[rollout]", "learner": "[learner]", "retriever": "[retriever]"}
SPARE_DISK = 2.0
"""Published versions on disk beyond those kept: the one being written and one more."""


def packages(config: RunConfig | None = None) -> Iterator[Finding]:
    """Check which processes this environment can run, including those that `config` starts."""
    starts = {"protocol": True}
    if config is not None:
        serves = config.launch.rollouts > 0 or bool(config.engine_roles)
        starts |= {"learner": config.launch.learner, "rollout server": serves}
    for process, names in NEEDED.items():
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        if absent:
            # Processes may run in separate environments: only those started here must be installed in this one.
            verdict: Verdict = "fail" if starts.get(process) else "warn"
            todo = f"pip install 'foray{EXTRAS[process]}' in the environment that runs it"
            yield Finding(f"{process} packages", verdict, f"not installed: {', '.join(absent)}", todo)
        else:
            yield Finding(f"{process} packages", "ok", ", ".join(names))


def system() -> Iterator[Finding]:
    """Check that processes can be started and ended here."""
    try:
        require_linux("`foray up`")
    except UserError as error:
        yield Finding.of("system", error)


def machine() -> Iterator[Finding]:
    """Describe this machine for a bug report."""
    yield from system()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding("machine", "ok", f"Python {python}, {cores} cores, {memory:.0f} GiB of memory")


def usable(config: RunConfig) -> Finding:
    """Check that the run directory can be created and written, with a temporary directory next to it."""
    wanted = config.run.dir.absolute()
    place = _nearest(wanted)
    todo = "set run.dir=DIR to a directory that you can write to"
    if not place.is_dir():
        return Finding("run.dir", "fail", f"{config.run.dir} is not usable: {place} is not a directory", todo)
    try:
        with tempfile.TemporaryDirectory(prefix=".foray-", dir=place):
            pass
    except OSError as error:
        detail = f"{config.run.dir} is not usable: {place} is not writable"
        return Finding("run.dir", "fail", detail, todo, error.strerror or str(error))
    return Finding("run.dir", "ok", f"{config.run.dir} is writable")


def _nearest(path: Path) -> Path:
    """Return `path` or its nearest existing parent."""
    while not os.path.exists(path):
        path = path.parent
    return path


def ports(config: RunConfig) -> Iterator[Finding]:
    """Check that the configured ports are free, and name the processes that use them."""
    wanted = {}
    if config.launch.rollouts:
        wanted["rollout.port"] = (config.rollout.host, config.rollout.port)
    if config.num_retrievers and "port" in config.retriever.model_fields_set:
        wanted["retriever.port"] = (config.retriever.host, config.retriever.port)
    if config.launch.engines and "port" in config.engine.model_fields_set:
        wanted["engine.port"] = (config.engine.host, config.engine.port)
    if config.launch.learner:
        wanted["learner.metrics_port"] = (config.learner.metrics_host, config.learner.metrics_port or 0)
    wanted = {name: (host or LOOPBACK, port) for name, (host, port) in wanted.items() if port}
    taken = {name: at for name, at in wanted.items() if not is_free(*at)}
    if not taken:
        yield Finding("ports", "ok", "free")
        return
    busy, fixes = [], []
    for name, (host, port) in taken.items():
        found = port_owner(port)
        busy.append(f"{name} = {port}" + (f" by process {found.pid} ({found.name})" if found else f" on {host}"))
        fixes.append(
            (f"kill {found.pid}, or " if found else "stop what listens there, or ") + f"set {name}=0 (a free port)"
        )
    yield Finding("ports", "fail", f"in use: {', '.join(busy)}", "; ".join(fixes))


def disk(config: RunConfig) -> Iterator[Finding]:
    """Check disk space for the kept checkpoints, the one being written, and the published versions."""
    weights = sum(path.stat().st_size for path in config.run.model.glob("*.safetensors"))
    if not weights or not config.launch.learner:
        return  # the model's size is unknown, or the learner writes on another host
    place = _nearest(config.run.dir.absolute())
    free = shutil.disk_usage(place).free
    kept = config.learner.keep_checkpoints
    publish = config.learner.publish
    copies = 0 if publish.type == "adapter" else KEEP_VERSIONS + SPARE_DISK
    if not config.learner.model.lora.rank:  # adapters are small
        # float32 weights and two moments, 12 bytes per parameter
        copies += 12 / stored_bytes(config.run.model) * (kept + 1)
    held = sum(_size(path) for path in (config.run.weights_dir, config.run.checkpoint_dir))
    needed = max(int(weights * copies) - held, 0) + (1 << 28)
    detail = f"{_gib(free)} free at {place}, about {_gib(needed)} needed for weights and {kept} + 1 checkpoints"
    if free < needed:
        todo = f"free {_gib(needed - free)}, move run.dir, or lower learner.keep_checkpoints (now {kept})"
        yield Finding("disk", "fail", detail, todo)
    else:
        yield Finding("disk", "ok", detail)


def main_memory(config: RunConfig, available: int | None) -> Iterator[Finding]:
    """Check that `available` bytes of main memory suffice for what the learner keeps there; None: unknown."""
    parts = memory_parts(config)
    if not parts or available is None:
        return
    needed = sum(parts.values())
    named = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    detail = f"{_gib(available)} available, {_gib(needed)} needed for the learner: {named}"
    if available < needed:
        yield Finding("main memory", "fail", detail, "set learner.async_checkpoints: false, or free main memory")
    else:
        yield Finding("main memory", "ok", detail)


def sandbox(config: RunConfig) -> Iterator[Finding]:
    """Check that the sandbox of the tool `python` works, by running a program in it."""
    for settings in config.rollout.episode.tools if config.launch.rollouts else ():
        if isinstance(settings, PythonSettings):
            try:
                output = asyncio.run(_run_program(settings))
            except UserError as error:
                yield Finding.of("tool python", error)
            except SandboxError as error:
                todo = "start the sandbox service, correct `sandbox.url`, or remove the tool from rollout.episode.tools"
                yield Finding("tool python", "fail", "the sandbox cannot run programs", todo, str(error))
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
    """Check that files with secrets are readable by their owner only. `path`: the configuration file, if any."""
    directory = config.launch.secrets
    if directory is not None and directory.is_dir():
        open_ = [p for p in (directory, *sorted(directory.iterdir())) if p.stat().st_mode & 0o077]
        if open_:
            names = ", ".join(str(p) for p in open_[:4]) + (" ..." if len(open_) > 4 else "")
            yield Finding("secrets", "fail", f"other users can read {names}", f"chmod -R go= {directory}")
        else:
            yield Finding("secrets", "ok", f"only the owner can read {directory}")
    elif directory is not None:
        todo = "run `foray init run.yaml --secure`, or remove launch.secrets"
        yield Finding("secrets", "fail", f"launch.secrets = {directory} is not a directory", todo)
    from protocol.runtime.redis.url import parse_redis_url

    if config.run.redis_url and parse_redis_url(config.run.redis_url).password:
        where = f" in {path}" if path else ""
        todo = "export FORAY_REDIS_URL in the environment of each process, and leave run.redis_url empty"
        yield Finding(
            "redis password", "warn", f"run.redis_url{where} contains a password, and is copied to run.dir", todo
        )


def _size(directory: Path) -> int:
    """Return the size of all files in bytes. A file that the learner deletes meanwhile counts as 0."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"
