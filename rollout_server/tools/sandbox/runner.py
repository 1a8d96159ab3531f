"""Running one program in the jail, seen from outside: a child process a program, its output up to a cap, its end.

The child leads a session and process group of its own. Whatever happens - the deadline, too much output, a caller that
is cancelled - it is asked to end, which takes all of its descendants along, and killed with its group after KILL_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_server.tools.sandbox.spec import READY, Spec, pack

KILL_S = 1.0
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
FIRST_UID = 1 << 30
"""User ids from here on belong to nobody; each program gets one, so that its threads are counted by themselves."""


class JailError(Exception):
    """The program could not be confined, and was not run."""


@dataclass(frozen=True)
class Limits:
    """Of one program. Seconds, MiB (1 << 20 bytes), bytes."""

    wall_s: float
    cpu_s: int
    memory_mb: int
    file_mb: int
    threads: int
    output_bytes: int


@dataclass(frozen=True)
class Ran:
    """How a program ended.

    stdout, stderr  the first `output_bytes` of each
    code            exit code; above 128: killed by that signal
    late            it was ended at the deadline
    flooded         it was ended because it wrote more than `output_bytes`
    """

    stdout: bytes
    stderr: bytes
    code: int
    late: bool = False
    flooded: bool = False


async def run_confined(source: str, limits: Limits, mechanisms: Sequence[str], libraries: Sequence[str] = ()) -> Ran:
    """Run `source` as a Python program. Takes `wall_s + KILL_S` seconds at most.

    mechanisms  of namespaces, landlock, seccomp: all of them hold, or nothing runs
    libraries   directories whose modules it may import besides the standard library

    Raises JailError when it could not be confined.
    """
    directory = tempfile.mkdtemp(prefix="foray-jail-")
    read_end, write_end = os.pipe()
    try:
        argv = command(limits, mechanisms, libraries, write_end)
        ran = await _run(argv, source.encode("utf-8", "replace"), directory, write_end, limits)
        _check(read_end, ran)
        return ran
    except OSError as error:
        raise JailError(f"no process could be started: {error.strerror}") from error
    finally:
        os.close(read_end)
        os.close(write_end)
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


def command(limits: Limits, mechanisms: Sequence[str], libraries: Sequence[str], report: int) -> list[str]:
    """What starts the jail: the interpreter, isolated and without site packages."""
    spec = Spec(
        list(mechanisms),
        readable(libraries),
        list(libraries),
        uid=FIRST_UID + random.randrange(1 << 29),
        report=report,
        cpu_s=limits.cpu_s,
        memory_mb=limits.memory_mb,
        file_mb=limits.file_mb,
        threads=limits.threads,
    )
    # not the one of a virtual environment: that one looks its home up in a file beside it
    python = getattr(sys, "_base_executable", "") or sys.executable
    entry = Path(__file__).with_name("__main__.py")
    return [python, "-I", "-S", "-B", "-X", "utf8", str(entry), pack(spec)]


def readable(libraries: Sequence[str] = ()) -> list[str]:
    """Directories that a program may read: the system's and Python's libraries, and `libraries`."""
    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib"))
    wanted = [*LIBRARIES, *python, *libraries]
    there = {path for name in wanted for path in (name, os.path.realpath(name)) if os.path.isdir(path)}
    # what contains another comes before it
    return sorted(there, key=lambda path: (len(path), path))


class _Watched(asyncio.SubprocessProtocol):
    """Takes what a child writes, up to `most` bytes of each stream, and knows when it is over."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heads = {1: bytearray(), 2: bytearray()}
        self.flooded = False
        self.over = asyncio.Event()
        """It has ended and its streams too, or it has written too much."""
        self.exited = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        head = self._heads[fd]
        head += data[: self._most + 1 - len(head)]
        if len(head) > self._most:
            self.flooded = True
            self.over.set()

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set()

    def head(self, fd: int) -> bytes:
        """What it has written to stdout (1) or stderr (2)."""
        return bytes(self._heads[fd][: self._most])


async def _run(argv: Sequence[str], source: bytes, directory: str, report: int, limits: Limits) -> Ran:
    """The jail as a child; when this returns or raises, neither it nor a descendant is left."""
    loop, pipe, late = asyncio.get_running_loop(), asyncio.subprocess.PIPE, False
    transport, watched = await loop.subprocess_exec(
        lambda: _Watched(limits.output_bytes),
        *argv,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        pass_fds=(report,),
        cwd=directory,
        env={},
        start_new_session=True,
    )
    try:
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(source)
        stdin.close()
        async with asyncio.timeout(limits.wall_s):
            await watched.over.wait()
    except TimeoutError:
        late = True
    finally:
        await asyncio.shield(asyncio.ensure_future(_end(transport, watched)))
    code = transport.get_returncode() or 0
    return Ran(watched.head(1), watched.head(2), code if code >= 0 else 128 - code, late, watched.flooded)


async def _end(transport: asyncio.SubprocessTransport, watched: _Watched) -> None:
    """Nothing of the child is left after this. It is asked first, since it takes its descendants along in good order;
    one that has ended by itself has done so already, and its group's number may be another's by now."""
    if transport.get_returncode() is None:
        transport.terminate()
        try:
            async with asyncio.timeout(KILL_S):
                await watched.exited.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
            await watched.exited.wait()
    transport.close()


def _check(report: int, ran: Ran) -> None:
    """Raises JailError unless the jail said that the program was confined."""
    os.set_blocking(report, False)
    try:
        said = os.read(report, 1 << 16)
    except BlockingIOError:
        said = b""
    if said == READY:
        return
    why = (said or ran.stderr.strip()[-500:]).decode("utf-8", "replace")
    raise JailError(why or ("not ready within its deadline" if ran.late else f"ended with code {ran.code}"))
