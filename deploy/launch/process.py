"""One process that the launcher started: spawn, poll, stop. The launcher signals only these processes.

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
from collections.abc import Callable
from pathlib import Path

from deploy.launch.plan import ProcessSpec
from deploy.terminal import escape_untrusted
from protocol.errors import ForayError
from protocol.redaction import for_terminal
from protocol.runtime.lifecycle import require_linux
from protocol.runtime.service_cli import INTERRUPTED, NOT_RESTARTED

PR_SET_PDEATHSIG = 1
TAIL_LINES = 25
_RANK_0 = re.compile(r"rank +: 0 \(local_rank: 0\)\n +exitcode +: (-?\d+) ")
"""In torchrun's report of failed ranks. torchrun itself always exits with 1."""
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
        self.cause = ""
        """What happened before that, if it may be the cause."""

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command: that of the process if it is in NOT_RESTARTED, else 1."""
        return self.code if self.code in NOT_RESTARTED else 1

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


class ManagedProcess:
    """A running or ended process of `spec`. Spawn it in a thread that lives as long as the run."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.spawned = time.monotonic()
        self.ready = False
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = spec.log.stat().st_size if spec.log.exists() else 0
        with spec.log.open("ab") as log:
            self._popen = subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name not in spec.hidden} | spec.env,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of its group."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Return the exit code (the negative signal number if a signal killed it), None while it runs; of several ranks
        that of rank 0.

        Processes left in the group of an ended process (the engine of a killed node) are killed before it is reaped:
        until then no other process can have its id, or the id of its group.
        """
        if self._popen.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._signal_group(signal.SIGKILL)
        code = self._popen.poll()
        found = _RANK_0.search(self.tail(1000)) if code == 1 and "torch.distributed.run" in self.spec.argv else None
        return int(found[1]) if found else code

    def terminate(self) -> None:
        """Send SIGTERM to this process only: it stops its own children."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill its whole group immediately."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last log lines of this process, not of an earlier one with the same name."""
        with self.spec.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - 64 * 1024))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def waiting_line(self, until: str = "", *, since: float = 0.0) -> str:
        """Return a line such as `waiting for engine-1 (registered in Redis as ready), 12 s; its log: ...`."""
        seconds = time.monotonic() - (since or self.spawned)
        last = next((line for line in reversed(self.tail().splitlines()) if line.strip()), "")
        log = f"; its log: {escape_untrusted(_STAMP.sub('', last.strip()), 100)}" if last else ""
        return f"waiting for {self.spec.name} {until or f'({self.spec.ready})'}, {seconds:.0f} s{log}"

    def failed(self, what: str) -> ProcessFailed:
        """Return the error that says how this process ended the run."""
        return ProcessFailed(self.spec.name, what, code=self.poll(), log=self.spec.log, tail=self.tail())

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            # empty, or only zombies
            pass


def _die_with_parent(parent: int) -> Callable[[], None]:
    require_linux("starting processes")
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        # Runs between fork and exec: do not allocate locks. The library was loaded before the fork.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
