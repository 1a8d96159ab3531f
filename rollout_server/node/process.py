"""Launch an engine: interpreter, command line, environment, where its keys go, and the process until it has ended."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from protocol.errors import UserError
from protocol.redaction import is_secret_name, remember
from protocol.runtime.http.auth import Access, check_bind, engine_key
from protocol.settings import REDIS_URL_VARIABLE
from rollout_server.engine.client import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from rollout_server.node import guard
from rollout_server.node.capabilities import NO_OVERLAP
from rollout_server.node.config import CpuEngine, SglangEngine
from rollout_server.node.guard import kill_below

KEYS_FILE = "keys.yaml"
BEFORE_TEMPERATURE = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Variable that makes SGLang report log-probs of softmax(logits), whatever the temperature."""
ALWAYS = ("--incremental-streaming-output", "--enable-metrics")
FP32_LM_HEAD = "--enable-fp32-lm-head"
SOURCE = Path(__file__).resolve().parents[2]
"""The directory that holds Foray's packages: in a checkout, its root."""
MAKE_ENVIRONMENT = "`make sglang-env` builds .venv-sglang for a machine without GPUs; else set engine.kind.python"

log = logging.getLogger(__name__)
STOP_S = 3.0
"""How long a child may take to end after SIGTERM before it is killed. It has no requests then: nothing is lost."""


@dataclass(frozen=True)
class EngineKeys:
    """What opens one incarnation of an engine. "" stands for no key: the routes are open then.

    api    generation, and what only looks; rollout servers have it too
    admin  pauses and weights; known to the node alone
    """

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)


def new_keys(access: Access, engine_id: str, incarnation: str, environ: Mapping[str, str] = os.environ) -> EngineKeys:
    """Keys of a new incarnation: those that a person gave for engines, else such as were never used before.

    The API key follows from the node token, so that rollout servers can derive it and nothing secret stands in Redis;
    without that token there is none. The admin key is drawn at random, and lives as long as the incarnation.
    """
    admin = environ.get(ADMIN_KEY_VARIABLE, "") or secrets.token_urlsafe(32)
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
) -> list[str]:
    """The command line of an engine that serves `model` and calls it `label`. Raises UserError.

    home      a directory of this launch alone: SGLang reads its keys from a file there
    day       what chat templates that say the day say (`run.date`); SGLang has no such flag
    in_place  it will be paused in place: SGLang must then record a step before it launches the next (`capabilities`)
    """
    common = ["--model-path", str(model), "--host", host, "--port", str(port), "--weight-version", label]
    if isinstance(kind, CpuEngine):
        named = [("--api-key-env", API_KEY_VARIABLE, keys.api), ("--admin-api-key-env", ADMIN_KEY_VARIABLE, keys.admin)]
        return [
            *(sys.executable, "-m", "rollout_server.cpu_engine", *common),
            *("--threads", str(kind.threads), "--max-running", str(kind.max_running)),
            *("--max-total-tokens", str(kind.max_total_tokens)),
            *(("--date", day.isoformat()) if day else ()),
            *(word for flag, name, value in named if value for word in (flag, name)),
        ]
    program = [str(launcher(kind.launcher))] if kind.launcher else ["-m", "sglang.launch_server"]
    return [
        *(interpreter(kind.python), *program, *common),
        *("--max-running-requests", str(kind.max_running)),
        # a streamed turn is then as long as its tokens, not as their square; and retractions can be read
        *(
            flag
            for flag in (*ALWAYS, *_fp32_lm_head(kind, model), *([NO_OVERLAP] if in_place else []))
            if flag not in kind.args
        ),
        *_with_keys(kind.args, keys, home),
    ]


def _fp32_lm_head(kind: SglangEngine, model: Path) -> list[str]:
    """The flag, where the model is served in half precision, and not by `--device cpu`."""
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
            return []  # SGLang will say what is wrong with it
    half = dtype in ("bfloat16", "float16", "half")
    return [FP32_LM_HEAD] if kind.fp32_lm_head and half and given.device != "cpu" else []


def environment(kind: CpuEngine | SglangEngine, keys: EngineKeys = EngineKeys()) -> Mapping[str, str]:
    """The child's environment: ours without Foray's secrets and addresses, with the embedded engine's keys and threads.

    An engine runs a lot of foreign code, and needs neither Redis nor our tokens. Other secrets (of a model hub, say)
    are its own business. SGLang is kept from reporting log-probs before temperature: the learner divides by it.
    """
    out = {name: value for name, value in os.environ.items() if not _ours(name) and name != BEFORE_TEMPERATURE}
    if isinstance(kind, CpuEngine):
        out |= {"OMP_NUM_THREADS": str(kind.threads), "MKL_NUM_THREADS": str(kind.threads)}
        out |= {n: value for n, value in ((API_KEY_VARIABLE, keys.api), (ADMIN_KEY_VARIABLE, keys.admin)) if value}
    return out


def check_host(host: str, access: Access, environ: Mapping[str, str] = os.environ) -> None:
    """Raises UserError for an engine that would answer without a key beyond this machine."""
    if not environ.get(API_KEY_VARIABLE):
        relevant = Access({role: token for role, token in access.tokens.items() if role == "node"})
        check_bind(host, relevant, "engine.host")


def _ours(name: str) -> bool:
    return name.startswith("FORAY_") and (is_secret_name(name.removesuffix("_FILE")) or name == REDIS_URL_VARIABLE)


def _with_keys(args: Sequence[str], keys: EngineKeys, home: Path | None) -> list[str]:
    """`args`, and how SGLang is given its keys: in a file, since a command line is read by all of the machine.

    SGLang takes one --config: what a file of that kind in `args` says goes into ours.
    """
    given = {flag: key for flag, key in (("api-key", keys.api), ("admin-api-key", keys.admin)) if key}
    if not given:
        return list(args)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    known, rest = _parsed(parser, args)
    merged = _flags(known.config) | given if known.config else given
    if home is None:
        raise ValueError("keys need a directory")
    path = home / KEYS_FILE
    with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w") as file:
        yaml.safe_dump(merged, file)
    return [*rest, "--config", str(path)]


def _parsed(parser: argparse.ArgumentParser, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    try:
        return parser.parse_known_args(list(args))
    except argparse.ArgumentError as error:
        todo = 'write flag and value as two words, e.g. ["--dtype", "bfloat16"]'
        raise UserError("engine.kind.args is no command line of SGLang", str(error), todo) from None


def _flags(given: Path) -> dict[str, Any]:
    try:
        flags = yaml.safe_load((_found(given) or given).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {given}", why=f"engine.kind.args names it: {error}") from None
    if not isinstance(flags, dict):
        raise UserError(f"{given} does not hold flags of SGLang", todo="write one `flag: value` a line")
    return flags


def interpreter(given: str) -> str:
    """The program to run, symbolic links kept: through one, an interpreter knows its environment."""
    if not given:
        return sys.executable
    if os.sep not in given:
        if shutil.which(given) is None:
            raise UserError(
                f"there is no program {given!r} on the PATH", "engine.kind.python names it", MAKE_ENVIRONMENT
            )
        return given
    path = _found(Path(given))
    if path is None or not os.access(path, os.X_OK):
        raise UserError(f"there is no interpreter at {given}", "engine.kind.python names it", MAKE_ENVIRONMENT)
    return str(path)


def launcher(given: Path) -> Path:
    path = _found(given)
    if path is None:
        raise UserError(f"there is no launcher at {given}", "engine.kind.launcher names it", "give a script's path")
    return path


def _found(path: Path) -> Path | None:
    """`path` from where the node was started, else from the root of Foray's checkout; None when it is in neither."""
    tried = (base / path.expanduser() for base in (Path.cwd(), SOURCE))
    return next((candidate for candidate in tried if candidate.is_file()), None)


class EngineProcess:
    """One engine, a tree of processes below a guard; nothing of it outlives the node.

    exited  done when the engine and its tree are gone; to wait for it, take `wait`
    """

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, home: tempfile.TemporaryDirectory[str]):
        self._process, self.log_path, self._home = process, log_path, home
        self.exited = asyncio.create_task(process.wait(), name="engine-exit")

    @classmethod
    async def start(cls, command: Callable[[Path], list[str]], env: Mapping[str, str], log_path: Path) -> EngineProcess:
        """Starts `command(home)` with its output appended to `log_path`.

        home  a new directory that only we can read, where the engine stands and may drop files, removed in the end
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # away from the repository: its folders must not become importable
        home = tempfile.TemporaryDirectory(prefix="foray-engine-")
        try:
            argv = command(Path(home.name))
            # ours alone: a server that prints its arguments when it starts prints its keys
            with os.fdopen(os.open(log_path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600), "ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guard.__file__, *argv),
                    env=dict(env),
                    cwd=home.name,
                    stdin=asyncio.subprocess.PIPE,  # held open, and with it the engine alive, until this process ends
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            home.cleanup()
            raise
        log.info("engine started below process %d, its output is in %s", process.pid, log_path)
        return cls(process, log_path, home)

    @property
    def pid(self) -> int:
        """The guard's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The engine's exit status, 128 + n for signal n; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for the end of the engine; its exit status."""
        # shielded: who is cancelled while it waits does not take the news from the others
        return await asyncio.shield(self.exited)

    async def stop(self, *, grace_s: float = STOP_S) -> None:
        """SIGTERM, and SIGKILL to the whole tree after grace_s, at once when cancelled. Safe when it is gone."""
        try:
            if grace_s and not self.exited.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait({self.exited}, timeout=grace_s)
        finally:
            await self._kill()

    async def _kill(self) -> None:
        try:
            if not self.exited.done():
                # not by the guard: what stopped the engine may have stopped the guard too
                kill_below(self.pid)
                self._signal(signal.SIGCONT)  # the guard takes leave of its dead, and exits
                await asyncio.wait({self.exited}, timeout=guard.SWEEP_S)
        finally:
            if not self.exited.done():
                self._signal(signal.SIGKILL)
            self._home.cleanup()
        await self.exited

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            self._process.send_signal(number)

    def tail(self, lines: int = 15) -> str:
        """The last lines of its output."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(its log cannot be read: {error})"
