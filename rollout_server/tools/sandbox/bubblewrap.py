"""Sandbox on this machine: `bwrap` starts a Python interpreter in separate namespaces.

    property                     enforced by
    no network                   a network namespace without any interface
    no host files                a separate root with system and Python libraries, read-only; no /proc, no /dev
    no writes outside            a tmpfs of `file_mb`, removed with the program; everything else is read-only
    no access to processes       a process namespace, which ends with its first process (`--die-with-parent`)
    no privileges                capabilities dropped, `no_new_privs`, no further user namespaces (`--disable-userns`)
    memory, CPU, processes       resource limits that the interpreter first sets for itself (`program.py`)
    time, output                 this process, which kills the sandbox

As root, a first `bwrap` mounts the libraries below directories that all users can enter, and a second one runs inside
it as `nobody`: the kernel does not limit the number of processes of root. None of this protects against kernel bugs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from socket import create_server

from protocol.errors import UserError
from protocol.runtime.timing import loop_timeout
from rollout_server.tools.sandbox.base import ProgramResult, SandboxBase, SandboxError, SandboxLimits
from rollout_server.tools.sandbox.program import READY

SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
WORK_DIR = "/program"
NOBODY = 65534
KILL_S = 1.0
CHECK_S = 20.0
"""Timeout of the isolation test in seconds: a loaded machine is slow to start a process."""


class Bubblewrap:
    """Runs each program in a new sandbox.

    Raises UserError if `bwrap` is missing or does not isolate programs on this machine.
    """

    def __init__(self, settings: SandboxBase, limits: SandboxLimits, libraries: Sequence[str] = ()) -> None:
        self._limits = limits
        self._command = command(limits, libraries)
        check_isolation(self._command)

    async def run(self, source: str) -> ProgramResult:
        """Run a program, see `Sandbox`. Takes little longer than `wall_s`."""
        limits = self._limits
        process = await self._start()
        assert process.stdin and process.stdout and process.stderr
        stdout, stderr, timed_out = bytearray(), bytearray(), False
        try:
            async with loop_timeout(limits.wall_s):
                await asyncio.gather(
                    _write(process.stdin, source.encode("utf-8", "replace")),
                    _read(process.stdout, stdout, limits.output_bytes + len(READY), process),
                    _read(process.stderr, stderr, limits.output_bytes, process),
                    process.wait(),
                )
        except TimeoutError:
            timed_out = True
        finally:
            await _end(process)
        code = process.returncode or 0
        if not stdout.startswith(READY):
            reason = stderr.decode("utf-8", "replace").strip()[-500:]
            raise SandboxError(reason or ("not ready in time" if timed_out else f"exit code {code}"))
        output, most = stdout[len(READY) :], limits.output_bytes
        return ProgramResult(
            bytes(output[:most]),
            bytes(stderr[:most]),
            code if code >= 0 else 128 - code,
            timed_out,
            max(len(output), len(stderr)) > most,
        )

    async def close(self) -> None:
        return None

    async def _start(self) -> asyncio.subprocess.Process:
        """Start the sandbox. Raises SandboxError. Leaves no process if the caller is cancelled."""
        pipe = asyncio.subprocess.PIPE
        start = asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", env={}, start_new_session=True
        )
        # shielded: asyncio would kill only `bwrap`, which may not control its children yet
        starting = asyncio.ensure_future(start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await _end(await starting)
            raise
        except OSError as error:
            raise SandboxError(f"{self._command[0]} could not start: {error.strerror}") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the sandbox, and read the streams to their end: they close when no process of the sandbox is left."""

    async def end() -> None:
        _kill(process)
        try:
            async with asyncio.timeout(KILL_S):
                await process.communicate()
        except TimeoutError:  # it was still starting and had no first process to kill
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()

    await asyncio.shield(asyncio.ensure_future(end()))


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, into: bytearray, most: int, process: asyncio.subprocess.Process) -> None:
    """Read a stream to its end, the first `most + 1` bytes into `into`; kill the process when it writes more."""
    while chunk := await stream.read(1 << 16):
        into += chunk[: most + 1 - len(into)]
        if len(into) > most:
            _kill(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the first process of the sandbox, and with it all others. `bwrap` reaps it, so no zombie is left."""
    if process.returncode is None:
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)


def command(limits: SandboxLimits, libraries: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command line that runs a program from stdin. Raises UserError if a required tool is missing."""
    bwrap = _which("bwrap", "bubblewrap")
    # not that of a virtual environment, which reads its home from a file next to it
    python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    shown = _show(*readable(libraries), python)
    numbers = (limits.cpu_s, limits.memory_mb, limits.file_mb, limits.threads)
    program = Path(__file__).with_name("program.py").read_text("utf-8")
    inner = (
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--die-with-parent"),
        *("--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--clearenv", "--setenv", "LD_LIBRARY_PATH", os.path.join(sys.base_prefix, "lib")),
        *shown,
        *("--size", str(limits.file_mb << 20), "--tmpfs", WORK_DIR, "--chdir", WORK_DIR, "--remount-ro", "/"),
        *(python, "-I", "-S", "-B", "-X", "utf8", "-c", program, *map(str, numbers), *libraries),
    )
    if os.getuid() != 0:
        return inner
    setpriv, unshare = _which("setpriv", "util-linux"), _which("unshare", "util-linux")
    # Not `bwrap --unshare-pid`: its parent process drops CAP_KILL, and the kernel then does not deliver its
    # parent-death signal to a process of another user.
    namespace = (setpriv, "--pdeathsig", "KILL", unshare, "--pid", "--fork", "--kill-child=KILL")
    nobody = (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    # the second bwrap needs /proc, and /tmp to mount its root on
    outer = (bwrap, "--die-with-parent", *shown, *_show(bwrap, setpriv), "--proc", "/proc", "--dir", "/tmp")
    return (*namespace, *outer, *nobody, *inner)


def _show(*paths: str) -> list[str]:
    """Return arguments that mount `paths` read-only at the same paths, below directories that all users can enter."""
    parents = {str(parent) for path in paths for parent in Path(path).parents} - {"/", *paths}
    made = [argument for parent in sorted(parents, key=len) for argument in ("--dir", parent)]
    return made + [argument for path in paths for argument in ("--ro-bind", path, path)]


def readable(libraries: Sequence[str] = ()) -> list[str]:
    """Return the directories that a program may read: libraries of the system and of Python, and `libraries`."""
    python = (sysconfig.get_path("stdlib"), *(os.path.join(p, "lib") for p in (sys.base_prefix, sys.base_exec_prefix)))
    wanted = [*SYSTEM_LIBRARIES, *python, *libraries]
    found = {path for name in wanted for path in (name, os.path.realpath(name)) if os.path.isdir(path)}
    return sorted(path for path in found if not any(str(parent) in found for parent in Path(path).parents))


def _which(tool: str, package: str) -> str:
    path = shutil.which(tool)
    if path is None:
        raise UserError(
            "the tool python has no sandbox on this machine",
            why=f"{tool} is not installed",
            todo=f"apt-get install {package}; or use a sandbox service: "
            "`sandbox: {type: service, url: ...}`; or remove the tool",
        )
    return os.path.realpath(path)


_ATTACK = """
import os, socket
escaped = []
def attempt(what, act):
    try:
        act()
        escaped.append(what)
    except OSError:
        pass
attempt("network", lambda: socket.create_connection(("127.0.0.1", {port}), 1))
attempt("files", lambda: open({canary!r}).read())
attempt("files", lambda: open({canary!r} + ".new", "w").close())
attempt("processes", lambda: os.kill({parent}, 0))
print("tried", *escaped)
"""


@lru_cache
def check_isolation(command: tuple[str, ...]) -> None:
    """Test the isolation with a hostile program, once per process: containers may forbid namespaces.

    Raises UserError if it could not run, or if it reached the network, a file or a process outside.
    """
    with tempfile.TemporaryDirectory(prefix="foray-canary-") as directory, create_server(("127.0.0.1", 0)) as near:
        canary = Path(directory) / "canary"
        canary.write_text("seen")
        source = _ATTACK.format(port=near.getsockname()[1], canary=str(canary), parent=os.getpid())
        try:
            done = subprocess.run(
                command, input=source.encode(), capture_output=True, cwd="/", env={}, timeout=CHECK_S, check=False
            )
            output, why = done.stdout.decode(), done.stderr.decode("utf-8", "replace").strip()[-300:]
        except (OSError, subprocess.TimeoutExpired) as error:
            output, why = "", str(error)[-300:]
    if output != f"{READY.decode()}tried\n":
        escaped = output.split()[2:]
        raise UserError(
            "the tool python cannot isolate programs on this machine",
            why=f"a program reached: {', '.join(escaped)}" if escaped else f"bwrap: {why or 'no answer'}",
            todo="allow user namespaces for this process (bubblewrap 0.8, Linux 5.14; no default container); or use "
            "a sandbox service: `sandbox: {type: service, url: ...}`; or remove the tool",
        )
