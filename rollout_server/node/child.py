"""The engine as a child process: where its output goes, how it ends, and that nothing of it outlives its node."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rollout_server.node import guard
from rollout_server.node.guard import kill_below

log = logging.getLogger(__name__)

STOP_S = 3.0
"""How long a child may take to end after SIGTERM before it is killed. It has no requests then: nothing is lost."""


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Child:
    """One engine, a tree of processes below a guard. `exited` is done when the engine and its tree are gone; to wait
    for it, take `ended`."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, home: tempfile.TemporaryDirectory[str]):
        self._process, self.log_path, self._home = process, log_path, home
        self.exited = asyncio.create_task(process.wait(), name="engine-exit")

    @classmethod
    async def start(cls, command: Callable[[Path], list[str]], env: Mapping[str, str], log_path: Path) -> Child:
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

    async def ended(self) -> int:
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
                # by ourselves: whoever stopped the engine may have stopped its guard too
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
