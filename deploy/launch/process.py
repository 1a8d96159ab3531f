"""The processes that a backend started: spawn, poll, stop. The launcher signals only these processes.

Each child leads its own session: Ctrl-C in the terminal reaches only the launcher (which then stops everything in
order), and a signal to the child's group reaches its own children. If the launcher is killed (SIGKILL), the kernel
sends SIGTERM to the child, so no process is left.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from deploy.config import RunConfig
from deploy.hardware.assign import Placement
from deploy.hardware.run import on_this_machine
from deploy.launch.plan import HOST, ProcessSpec
from deploy.terminal import escape_untrusted
from protocol.errors import ForayError
from protocol.redaction import for_terminal
from protocol.runtime.lifecycle import require_linux
from protocol.runtime.net import free_port
from protocol.runtime.service_cli import INTERRUPTED, NOT_RESTARTED
from rollout_server.node.guard import cpu_s, memory_mib

PR_SET_PDEATHSIG = 1
LOOPBACK = "127.0.0.1"
TAIL_LINES = 25
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (INFO )?")


OUT_OF_MEMORY = (
    "if it was the out-of-memory killer (`dmesg | grep -i 'killed process'`), lower launch.engines, retriever sizes or "
    "learner.batch.micro_batch_tokens, or set learner.async_checkpoints=false; `foray doctor` estimates the memory"
)


class ProcessFailed(ForayError):
    """A process exited or was not ready in time, which ended the run. `code` is its exit code."""

    def __init__(self, name: str, what: str, *, code: int | None, log: Path, tail: str) -> None:
        super().__init__(f"{name} {what}")
        self.name, self.what, self.code, self.log, self.tail = name, what, code, log, tail
        self.exit_code = code if code in NOT_RESTARTED else ForayError.exit_code
        self.cause = ""
        """What happened before that, if it may be the cause."""

    @property
    def state(self) -> str:
        """Return the state of the run that ended so: interrupted if something else stopped its learner, else failed."""
        return "interrupted" if self.name == "learner" and self.code in INTERRUPTED else "failed"

    def render(self) -> str:
        """Return what happened, the end of the process's log, and the path of the log."""
        indented = "\n".join(f"  | {line}" for line in self.tail.splitlines()) or "  | (its log is empty)"
        todo = f"\n   do: {OUT_OF_MEMORY}" if self.code == -signal.SIGKILL else ""
        cause = f"\n  why: {self.cause}" if self.cause else ""
        return for_terminal(f"error: {self.name} {self.what}\n{indented}\n  log: {self.log}{cause}{todo}")


class Child(Protocol):
    """A started process of `spec`. Backends implement it; `Supervisor` knows nothing else of a process.

    host     address of its host, "" while that is unknown
    ready    whether it was ready once
    spawned  when, in seconds of `time.monotonic`
    lost     it ended because its host was lost, which is no fault of the process
    """

    spec: ProcessSpec
    spawned: float
    host: str = ""
    ready: bool = False
    lost: bool = False

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec, self.spawned = spec, time.monotonic()

    @property
    def has_finished(self) -> bool:
        """Return whether it is a learner that has taken its last step."""
        return self.spec.kind == "learner" and self.poll() == 0

    @property
    @abstractmethod
    def pid(self) -> int:
        """Return the process id on its host, 0 while that is unknown."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code (the negative signal number if a signal killed it), None while it runs."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to this process only: it stops its own children."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it and what it started immediately."""

    @abstractmethod
    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last log lines of this process, not of an earlier one with the same name."""

    @abstractmethod
    def memory_mib(self) -> int:
        """Return the resident memory of this process and those below it."""

    @abstractmethod
    def cpu_s(self) -> float:
        """Return the seconds of CPU that this process and those below it have used."""

    def wait(self, timeout_s: float) -> bool:
        """Return whether it ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def waiting_line(self, until: str = "", *, since: float = 0.0) -> str:
        """Return a line such as `waiting for engine-1 (registered in Redis as ready), 12 s; its log: ...`."""
        seconds = time.monotonic() - max(since, self.spawned)
        last = next((line for line in reversed(self.tail().splitlines()) if line.strip()), "")
        log = f"; its log: {escape_untrusted(_STAMP.sub('', last.strip()), 100)}" if last else ""
        return f"waiting for {self.spec.name} {until or f'({self.spec.ready})'}, {seconds:.0f} s{log}"

    def failed(self, what: str) -> ProcessFailed:
        """Return the error that says how this process ended the run."""
        return ProcessFailed(self.spec.name, what, code=self.poll(), log=self.spec.log, tail=self.tail())


class LaunchBackend(Protocol):
    """What starts the processes of a run: this machine, or a cluster of several.

    address: this host's, at which the others reach Redis; "" for this machine alone
    """

    address: str

    def place(self, config: RunConfig) -> Placement:
        """Return the host and the GPUs of each process; waits for room. Raises UserError if there is none."""

    def spawn(self, specs: Sequence[ProcessSpec]) -> Sequence[Child]:
        """Start the processes of one group (often one process) where there is room; does not wait for it."""

    def release(self, name: str) -> None:
        """Give back the place of an engine that has ended and is not restarted."""

    def close(self) -> None:
        """Give back the places of the run, whose processes have ended."""


class LocalBackend:
    """This machine."""

    address = ""

    def place(self, config: RunConfig) -> Placement:
        """Return the GPUs of each process."""
        return on_this_machine(config)

    def spawn(self, specs: Sequence[ProcessSpec]) -> Sequence[Child]:
        """Start the processes of one group."""
        place = rendezvous(LOOPBACK, free_port()) if len(specs) > 1 else {}
        return [ManagedProcess(replace(spec, env=spec.env | place)) for spec in specs]

    def release(self, name: str) -> None:
        """Return: places are given at the start."""

    def close(self) -> None:
        """Return: no place is held."""


def rendezvous(host: str, port: int) -> dict[str, str]:
    """Return torch's variables for the rendezvous of a group's ranks, which is on the host of the first."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def log_tail(path: Path, start: int, lines: int) -> str:
    """Return the last lines after byte `start` of a log."""
    with path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(start, end - 64 * 1024))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])


class ManagedProcess(Child):
    """A process of this machine. Spawn it in a thread that lives as long as the run.

    end: what the kernel sends it if this process is killed
    """

    def __init__(self, spec: ProcessSpec, host: str = LOOPBACK, end: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(spec)
        self.host = host
        inherited = {name: value for name, value in os.environ.items() if name not in spec.hidden}
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = spec.log.stat().st_size if spec.log.exists() else 0
        with spec.log.open("ab") as log:
            self._popen = subprocess.Popen(
                [word.replace(HOST, host) for word in spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | spec.env | spec.env_secret,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid(), end),
            )

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of its group."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Return the exit code (the negative signal number if a signal killed it), None while it runs.

        Processes left in the group of an ended process (the engine of a killed node) are killed before it is reaped:
        until then no other process can have its id, or the id of its group.
        """
        if self._popen.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._kill_group()
        return self._popen.poll()

    def terminate(self) -> None:
        """Send SIGTERM to this process only: it stops its own children."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill its whole group immediately."""
        if self.poll() is None:
            self._kill_group()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last log lines of this process, not of an earlier one with the same name."""
        return log_tail(self.spec.log, self._log_start, lines)

    def memory_mib(self) -> int:
        """Return the resident memory of this process and those below it."""
        return memory_mib(self.pid)

    def cpu_s(self) -> float:
        """Return the seconds of CPU that this process and those below it have used."""
        return cpu_s(self.pid)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # empty, or only zombies
            os.killpg(self.pid, signal.SIGKILL)


def _die_with_parent(parent: int, end: signal.Signals) -> Callable[[], None]:
    require_linux("starting processes")
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        # Runs between fork and exec: do not allocate locks. The library was loaded before the fork.
        libc.prctl(PR_SET_PDEATHSIG, end)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
