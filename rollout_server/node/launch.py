"""What is run when a node launches its engine: interpreter, command line, environment, and where its keys go."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from protocol.errors import UserError
from rollout_server.engine.http import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from rollout_server.node.config import CpuEngine, SglangEngine
from rollout_server.node.facts import NO_OVERLAP

KEYS_FILE = "keys.yaml"
ALWAYS = ("--incremental-streaming-output", "--enable-metrics")
SOURCE = Path(__file__).resolve().parents[2]
"""The directory that holds Foray's packages: in a checkout, its root."""
MAKE_ENVIRONMENT = "`make sglang-env` builds .venv-sglang for a machine without GPUs; else set engine.kind.python"


def command(
    kind: CpuEngine | SglangEngine,
    *,
    model: Path,
    label: str,
    host: str,
    port: int,
    home: Path | None = None,
    in_place: bool = False,
) -> list[str]:
    """The command line of an engine that serves `model` and calls it `label`. Raises UserError.

    home      a directory of this launch alone: SGLang reads its keys from a file there
    in_place  it will be paused in place: SGLang must then book each step before it launches the next (`facts.py`)
    """
    common = ["--model-path", str(model), "--host", host, "--port", str(port), "--weight-version", label]
    if isinstance(kind, CpuEngine):
        keys = [("--api-key-env", API_KEY_VARIABLE), ("--admin-api-key-env", ADMIN_KEY_VARIABLE)]
        return [
            *(sys.executable, "-m", "rollout_server.cpu_engine", *common),
            *("--threads", str(kind.threads), "--max-running", str(kind.max_running)),
            *("--max-total-tokens", str(kind.max_total_tokens)),
            *(word for flag, name in keys if os.environ.get(name) for word in (flag, name)),
        ]
    program = [str(_launcher(kind.launcher))] if kind.launcher else ["-m", "sglang.launch_server"]
    return [
        *(_interpreter(kind.python), *program, *common),
        *("--max-running-requests", str(kind.max_running)),
        # a streamed turn is then as long as its tokens, not as their square; and retractions can be read
        *(flag for flag in (*ALWAYS, *([NO_OVERLAP] if in_place else [])) if flag not in kind.args),
        *kind.args,
        *_keys(kind, home),
    ]


def environment(kind: CpuEngine | SglangEngine) -> Mapping[str, str]:
    """The child's environment: ours, with the threads of its arithmetic bounded for the embedded engine."""
    out = dict(os.environ)
    if isinstance(kind, CpuEngine):
        out |= {"OMP_NUM_THREADS": str(kind.threads), "MKL_NUM_THREADS": str(kind.threads)}
    return out


def _keys(kind: SglangEngine, home: Path | None) -> list[str]:
    """Arguments that give SGLang its keys: through a file, since a command line is read by all of the machine."""
    names = {"api-key": API_KEY_VARIABLE, "admin-api-key": ADMIN_KEY_VARIABLE}
    keys = {flag: os.environ[name] for flag, name in names.items() if os.environ.get(name)}
    if not keys:
        return []
    if "--config" in kind.args:
        raise UserError(
            "SGLang takes one --config, and it is needed for the engine's keys",
            why=f"{' and '.join(names.values())} reach it through a file of that kind, where nobody else can read them",
            todo="write what your file says as further engine.kind.args",
        )
    if home is None:
        raise ValueError("keys need a directory")
    path = home / KEYS_FILE
    with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        yaml.safe_dump(keys, file)
    return ["--config", str(path)]


def _interpreter(given: str) -> str:
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


def _launcher(given: Path) -> Path:
    path = _found(given)
    if path is None:
        raise UserError(f"there is no launcher at {given}", "engine.kind.launcher names it", "give a script's path")
    return path


def _found(path: Path) -> Path | None:
    """`path` from where the node was started, else from the root of Foray's checkout; None when it is in neither."""
    tried = (base / path.expanduser() for base in (Path.cwd(), SOURCE))
    return next((candidate for candidate in tried if candidate.is_file()), None)
