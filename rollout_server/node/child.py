"""The engine as a child process: what is run, where its output goes, and that it never outlives its node."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rollout_server.engine.http import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from rollout_server.node.config import CpuEngine, SglangEngine

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
STOP_S = 10.0
"""How long a child may take to end after SIGTERM before it is killed."""

_libc = ctypes.CDLL(None, use_errno=True)


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def command(kind: CpuEngine | SglangEngine, *, model: Path, label: str, host: str, port: int) -> list[str]:
    """The command line of an engine that serves `model` and calls it `label`."""
    common = ["--model-path", str(model), "--host", host, "--port", str(port), "--weight-version", label]
    if isinstance(kind, CpuEngine):
        keys = [("--api-key-env", API_KEY_VARIABLE), ("--admin-api-key-env", ADMIN_KEY_VARIABLE)]
        return [
            *(sys.executable, "-m", "rollout_server.cpu_engine", *common),
            *("--threads", str(kind.threads), "--max-running", str(kind.max_running)),
            *("--max-total-tokens", str(kind.max_total_tokens)),
            *(word for flag, name in keys if os.environ.get(name) for word in (flag, name)),
        ]
    # SGLang takes its keys on the command line only, where every user of the machine can read them
    secrets = [("--api-key", API_KEY_VARIABLE), ("--admin-api-key", ADMIN_KEY_VARIABLE)]
    program = [str(kind.launcher.resolve())] if kind.launcher else ["-m", "sglang.launch_server"]
    return [
        *(kind.python or sys.executable, *program, *common),
        *("--max-running-requests", str(kind.max_running)),
        *kind.args,
        *(word for flag, name in secrets if os.environ.get(name) for word in (flag, os.environ[name])),
    ]


def environment(kind: CpuEngine | SglangEngine) -> Mapping[str, str]:
    """The child's environment: ours, with the threads of its arithmetic bounded for the embedded engine."""
    out = dict(os.environ)
    if isinstance(kind, CpuEngine):
        out |= {"OMP_NUM_THREADS": str(kind.threads), "MKL_NUM_THREADS": str(kind.threads)}
    return out


class Child:
    """One engine process, in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, home: tempfile.TemporaryDirectory[str]):
        self._process, self.log_path, self._home = process, log_path, home
        self.exited = asyncio.create_task(process.wait(), name="engine-exit")

    @classmethod
    async def start(cls, argv: list[str], env: Mapping[str, str], log_path: Path) -> Child:
        """Starts `argv` with its output appended to `log_path`. Raises OSError when the program is not there."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # away from the repository: its folders must not become importable, and engines drop files where they stand
        home = tempfile.TemporaryDirectory(prefix="foray-engine-")
        try:
            with log_path.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    env=dict(env),
                    cwd=home.name,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
        except BaseException:
            home.cleanup()
            raise
        log.info("engine started as process %d, its output is in %s", process.pid, log_path)
        return cls(process, log_path, home)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group after STOP_S. Safe to call when it is gone."""
        if not self.exited.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait({self.exited}, timeout=STOP_S)
        # the leader may be gone and leave children of its own behind
        self._signal(signal.SIGKILL)
        await self.exited
        self._home.cleanup()

    def tail(self, lines: int = 15) -> str:
        """The last lines of its output."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(its log cannot be read: {error})"

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # the group is empty: nothing left to signal


def _die_with_parent() -> None:
    """Runs in the child before exec: the kernel kills it when the node dies, by whatever means."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
