"""Launch an engine: interpreter, command line, environment, keys, and the running process."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from protocol.errors import UserError
from protocol.redaction import is_secret_name, remember
from protocol.runtime.config import NOT_YAML, parse_yaml
from protocol.runtime.http.auth import Access, check_bind, engine_key
from protocol.runtime.lifecycle import require_linux
from protocol.runtime.torch_safety import set_nccl_defaults, torch_versions
from protocol.settings import REDIS_URL_VARIABLE
from rollout_server.engine.client import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from rollout_server.node import guard
from rollout_server.node.capabilities import NO_OVERLAP
from rollout_server.node.config import GPU_INTERPRETER, AttachedEngine, CpuEngine, EngineKind, SglangEngine
from rollout_server.node.guard import kill_below

KEYS_FILE = "keys.yaml"
BEFORE_TEMPERATURE = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Variable that makes SGLang report log-probs of softmax(logits), without the temperature."""
INCREMENTAL = "--incremental-streaming-output"
"""A chunk then has its own tokens alone: bytes and parsing of a turn are linear in its tokens, not quadratic."""
ALWAYS = (INCREMENTAL, "--enable-metrics")
WATCHDOG = ("--watchdog-timeout", "86400")
"""SGLang ends itself when a step takes 300 s, however slow the machine is: the node's watchdog decides instead."""
FP32_LM_HEAD = "--enable-fp32-lm-head"
SOURCE = Path(__file__).resolve().parents[2]
"""Directory of Foray's packages: the root of a checkout."""
MAKE_ENVIRONMENT = (
    "install SGLang with `make gpu-env` (on a machine with NVIDIA GPUs) or `make sglang-env` (without), and set "
    f"engine.kind.python={GPU_INTERPRETER} or .venv-sglang/bin/python"
)

VERSIONS_PROGRAM = (
    "import json, sys; sys.path.append(sys.argv[1]); from protocol.runtime.torch_safety import torch_versions; "
    "print(json.dumps(torch_versions()))"
)
LONGEST_UPDATE_S = 3600.0
"""Largest --update-timeout-s of the CPU engine."""
VERSIONS_S = 30.0
"""Timeout for an interpreter to start and read its packages' metadata, also from a network file system."""

log = logging.getLogger(__name__)
STOP_S = 3.0
"""Time for the engine to exit after SIGTERM before it is killed. It has no requests then, so nothing is lost."""


@dataclass(frozen=True)
class EngineKeys:
    """Keys of one incarnation of an engine. "": no key, the routes are open.

    api    for generation and read-only routes; rollout servers have it too
    admin  for pauses and weights; known only to the node
    """

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)


def new_keys(access: Access, engine_id: str, incarnation: str, environ: Mapping[str, str] = os.environ) -> EngineKeys:
    """Return the keys of a new incarnation: those in the environment, otherwise new ones.

    The API key is derived from the node token, so that rollout servers can derive it too, and Redis holds no secret.
    Without a node token there is none. The admin key is random and valid for this incarnation.
    """
    # hexadecimal: SGLang takes a key that begins with "-" for a flag
    admin = environ.get(ADMIN_KEY_VARIABLE, "") or secrets.token_hex(32)
    keys = EngineKeys(environ.get(API_KEY_VARIABLE, "") or engine_key(access, engine_id, incarnation), admin)
    remember(keys.api)
    remember(keys.admin)
    return keys


def command(
    kind: CpuEngine | SglangEngine,
    *,
    model: Path,
    label: str,
    host: str,
    port: int,
    keys: EngineKeys = EngineKeys(),
    home: Path | None = None,
    in_place: bool = False,
    day: date | None = None,
    seed: int = 0,
    update_s: float = 300.0,
) -> list[str]:
    """Return the command line of an engine that serves `model` with the version label `label`. Raises UserError.

    home      private directory of this launch: SGLang reads its keys from a file there
    day       date for chat templates that contain one (`run.date`); SGLang has no such flag
    seed      of requests without one
    update_s  timeout of the CPU engine for the learner in a group, which ends a transfer much earlier
    in_place  it will be paused in place: SGLang must then run without overlap scheduling (see `capabilities`)
    """
    common = ["--model-path", str(model), "--host", host, "--port", str(port), "--weight-version", label]
    if isinstance(kind, CpuEngine):
        named = [("--api-key-env", API_KEY_VARIABLE, keys.api), ("--admin-api-key-env", ADMIN_KEY_VARIABLE, keys.admin)]
        return [
            *(sys.executable, "-m", "rollout_server.cpu_engine", *common),
            *("--threads", str(kind.threads), "--max-running", str(kind.max_running)),
            *("--max-total-tokens", str(kind.max_total_tokens), "--dtype", kind.dtype, "--seed", str(seed)),
            *("--update-timeout-s", f"{min(update_s, LONGEST_UPDATE_S):g}", INCREMENTAL),
            *(("--date", day.isoformat()) if day else ()),
            *(word for flag, name, value in named if value for word in (flag, name)),
        ]
    program = [str(launcher(kind.launcher))] if kind.launcher else ["-m", "sglang.launch_server"]
    return [
        *(interpreter(kind.python), *program, *common),
        *("--max-running-requests", str(kind.max_running), "--random-seed", str(seed)),
        # the metrics count retractions
        *(
            flag
            for flag in (*ALWAYS, *_fp32_lm_head(kind, model), *([NO_OVERLAP] if in_place else []))
            if flag not in kind.args
        ),
        *(() if WATCHDOG[0] in kind.args else WATCHDOG),
        *_with_keys(kind.args, keys, home),
    ]


def seed_of(run_seed: int, engine_id: str, incarnation: str) -> int:
    """Return a seed of 32 bits for an incarnation: two engines with one seed would repeat each other's answers."""
    return int.from_bytes(sha256(f"{run_seed}/{engine_id}/{incarnation}".encode()).digest()[:4])


def _fp32_lm_head(kind: SglangEngine, model: Path) -> list[str]:
    """Return the flag if the model is served in half precision, and not with `--device cpu`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="")
    given, _ = _parsed(parser, kind.args)
    dtype = given.dtype
    if dtype == "auto":
        try:
            facts = json.loads((model / "config.json").read_bytes())
            text = facts.get("text_config") or facts
            dtype = text.get("dtype") or text.get("torch_dtype") or facts.get("torch_dtype")
        except (OSError, ValueError, AttributeError):
            return []  # SGLang will report the error
    half = dtype in ("bfloat16", "float16", "half")
    return [FP32_LM_HEAD] if kind.fp32_lm_head and half and given.device != "cpu" else []


def environment(kind: CpuEngine | SglangEngine, keys: EngineKeys = EngineKeys()) -> Mapping[str, str]:
    """Return the child's environment, without Foray's secrets and addresses, with the engine's keys and threads.

    An engine runs much third-party code, and needs neither Redis nor Foray's tokens. Other secrets (such as those of a
    model hub) are passed on. SGLang is set to report log-probs with temperature, as the learner computes them.
    """
    out = {name: value for name, value in os.environ.items() if not _ours(name) and name != BEFORE_TEMPERATURE}
    if isinstance(kind, SglangEngine):
        set_nccl_defaults(out)
    else:
        out |= {"OMP_NUM_THREADS": str(kind.threads), "MKL_NUM_THREADS": str(kind.threads)}
        out |= {n: value for n, value in ((API_KEY_VARIABLE, keys.api), (ADMIN_KEY_VARIABLE, keys.admin)) if value}
    return out


def installed_versions(kind: EngineKind) -> dict[str, str]:
    """Return the versions of torch and NCCL in the engine's environment, {} where they cannot be read. Blocks.

    An attached engine may be on another machine. The interpreter of an SGLang is asked without importing torch.
    """
    if isinstance(kind, AttachedEngine):
        return {}
    if isinstance(kind, CpuEngine) or not kind.python:
        return torch_versions()
    argv = [interpreter(kind.python), "-c", VERSIONS_PROGRAM, str(SOURCE)]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=VERSIONS_S, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("cannot read the versions of torch and NCCL of %s: %s", kind.python, error)
        return {}
    return {name: str(version)[:256] for name, version in found.items()} if isinstance(found, dict) else {}


def check_host(host: str, access: Access, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if the engine would accept requests from other machines without a key."""
    if not environ.get(API_KEY_VARIABLE):
        relevant = Access({role: token for role, token in access.tokens.items() if role == "node"})
        check_bind(host, relevant, "engine.host")


def _ours(name: str) -> bool:
    return name.startswith("FORAY_") and (is_secret_name(name.removesuffix("_FILE")) or name == REDIS_URL_VARIABLE)


def _with_keys(args: Sequence[str], keys: EngineKeys, home: Path | None) -> list[str]:
    """Return `args` with SGLang's keys in a --config file: command lines are visible to all users of the machine.

    SGLang accepts a single --config, so the content of one in `args` is merged into it. Raises UserError.
    """
    given = {flag: key for flag, key in (("api-key", keys.api), ("admin-api-key", keys.admin)) if key}
    if not given:
        return list(args)
    if any(key.startswith("-") for key in given.values()):
        todo = f"choose a value of {API_KEY_VARIABLE} and {ADMIN_KEY_VARIABLE} that begins with a letter or a digit"
        raise UserError('an engine key begins with "-", which SGLang takes for a flag', todo=todo)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    known, rest = _parsed(parser, args)
    merged = _flags(known.config) | given if known.config else given
    if home is None:
        raise ValueError("keys require a directory")
    path = home / KEYS_FILE
    with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w") as file:
        yaml.safe_dump(merged, file)
    return [*rest, "--config", str(path)]


def _parsed(parser: argparse.ArgumentParser, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    try:
        return parser.parse_known_args(list(args))
    except argparse.ArgumentError as error:
        todo = 'write flag and value as two items, e.g. ["--dtype", "bfloat16"]'
        raise UserError("engine.kind.args is not a valid command line of SGLang", str(error), todo) from None


def _flags(given: Path) -> dict[str, Any]:
    try:
        flags = parse_yaml((_found(given) or given).read_text())
    except (OSError, *NOT_YAML) as error:
        raise UserError(f"cannot read {given}", why=f"it is in engine.kind.args: {error}") from None
    if not isinstance(flags, dict):
        raise UserError(f"{given} does not contain flags of SGLang", todo="write one `flag: value` per line")
    return flags


def interpreter(given: str) -> str:
    """Return the path of the program, with symbolic links kept: an interpreter finds its environment through them."""
    if not given:
        return sys.executable
    if os.sep not in given:
        if shutil.which(given) is None:
            raise UserError(
                f"there is no program {given!r} on the PATH", "it is set in engine.kind.python", MAKE_ENVIRONMENT
            )
        return given
    path = _found(Path(given))
    if path is None or not os.access(path, os.X_OK):
        raise UserError(f"there is no interpreter at {given}", "it is set in engine.kind.python", MAKE_ENVIRONMENT)
    return str(path)


def launcher(given: Path) -> Path:
    path = _found(given)
    if path is None:
        raise UserError(f"there is no launcher at {given}", "it is set in engine.kind.launcher", "set a script's path")
    return path


def _found(path: Path) -> Path | None:
    """Resolve `path` against the working directory, then Foray's checkout. Return None if it is in neither."""
    tried = (base / path.expanduser() for base in (Path.cwd(), SOURCE))
    return next((candidate for candidate in tried if candidate.is_file()), None)


class EngineProcess:
    """One engine: a tree of processes below a guard. None of them outlives the node.

    exited  done when the engine and its tree are gone; use `wait` to wait for it
    """

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, home: tempfile.TemporaryDirectory[str]):
        self._process, self.log_path, self._home = process, log_path, home
        self.exited = asyncio.create_task(process.wait(), name="engine-exit")

    @classmethod
    async def start(cls, command: Callable[[Path], list[str]], env: Mapping[str, str], log_path: Path) -> EngineProcess:
        """Start `command(home)` with its output appended to `log_path`.

        home  a new private directory: the working directory of the engine, removed at the end
        """
        require_linux("an engine node")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # not the repository: its folders must not become importable
        home = tempfile.TemporaryDirectory(prefix="foray-engine-")
        try:
            argv = command(Path(home.name))
            # private: a server that prints its arguments at startup prints its keys
            with os.fdopen(os.open(log_path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600), "ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guard.__file__, *argv),
                    env=dict(env),
                    cwd=home.name,
                    stdin=asyncio.subprocess.PIPE,  # kept open until this process ends: its close ends the engine
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            home.cleanup()
            raise
        log.info("started the engine (process %d), output in %s", process.pid, log_path)
        return cls(process, log_path, home)

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the engine, 128 + n for signal n; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the end of the engine. Return its exit status."""
        # shielded: cancelling one waiter must not affect the others
        return await asyncio.shield(self.exited)

    async def stop(self, *, grace_s: float = STOP_S) -> None:
        """Send SIGTERM, and SIGKILL to the whole tree after grace_s or when cancelled. Safe if it has exited."""
        try:
            if grace_s and not self.exited.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait({self.exited}, timeout=grace_s)
        finally:
            await self._kill()

    async def _kill(self) -> None:
        try:
            if not self.exited.done():
                # not through the guard, which may be stopped as well as the engine
                kill_below(self.pid)
                self._signal(signal.SIGCONT)  # the guard reaps its children and exits
                await asyncio.wait({self.exited}, timeout=guard.SWEEP_S)
        finally:
            if not self.exited.done():
                self._signal(signal.SIGKILL)
            self._home.cleanup()
        await self.exited

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has just exited
            self._process.send_signal(number)


def tail(log_path: Path, lines: int = 15) -> str:
    """Return the last lines of an engine's output."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(cannot read its log: {error})"
