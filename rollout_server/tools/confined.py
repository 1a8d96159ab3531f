"""Running one program in the jail, seen from outside: a child process a program, its output up to a cap, its end.

The child leads a session and process group of its own. Whatever happens - the deadline, too much output, a caller that
is cancelled - it is asked to end, which takes all of its descendants along, and killed with its group after KILL_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    directory = await asyncio.to_thread(tempfile.mkdtemp, prefix="foray-jail-")
    read_end, write_end = os.pipe()
    try:
        argv = command(limits, mechanisms, libraries, write_end)
        async with _process(argv, directory, write_end) as process:
            ran = await _watch(process, source.encode("utf-8", "replace"), limits)
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
    spec = {
        "mechanisms": list(mechanisms),
        "readable": readable(libraries),
        "libraries": list(libraries),
        "uid": FIRST_UID + random.randrange(1 << 29),
        "report": report,
        "cpu_s": limits.cpu_s,
        "memory_mb": limits.memory_mb,
        "file_mb": limits.file_mb,
        "threads": limits.threads,
    }
    # not the one of a virtual environment: that one looks its home up in a file beside it
    python = getattr(sys, "_base_executable", "") or sys.executable
    entry = Path(__file__).parent / "jail" / "__main__.py"
    return [python, "-I", "-S", "-B", "-X", "utf8", str(entry), json.dumps(spec)]


def readable(libraries: Sequence[str] = ()) -> list[str]:
    """Directories that a program may read: the system's and Python's libraries, and `libraries`."""
    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib"))
    wanted = [*LIBRARIES, *python, *libraries]
    there = {path for name in wanted for path in (name, os.path.realpath(name)) if os.path.isdir(path)}
    # what contains another comes before it
    return sorted(there, key=lambda path: (len(path), path))


@contextlib.asynccontextmanager
async def _process(argv: Sequence[str], directory: str, report: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """The jail as a child for the time of the block; after it neither it nor a descendant is left."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        pass_fds=(report,),
        cwd=directory,
        env={},
        start_new_session=True,
        limit=1 << 16,
    )
    try:
        yield process
    finally:
        await asyncio.shield(asyncio.ensure_future(_end(process)))


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            process.terminate()
    try:
        async with asyncio.timeout(KILL_S):
            await process.wait()
    except TimeoutError:
        pass
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _watch(process: asyncio.subprocess.Process, source: bytes, limits: Limits) -> Ran:
    """Feed the program, take what it writes, and wait for its end, the deadline, or too much output."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    streams = (process.stdout, process.stderr)
    heads = (bytearray(), bytearray())
    late = flooded = False
    try:
        async with asyncio.timeout(limits.wall_s):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(source)
                await process.stdin.drain()
                process.stdin.close()
            reading = [_head(stream, head, limits.output_bytes) for stream, head in zip(streams, heads, strict=True)]
            flooded = not all(await asyncio.gather(*reading))
            if not flooded:
                await process.wait()
    except TimeoutError:
        late = True
    await _end(process)
    code = process.returncode if process.returncode is not None else 0
    out, err = (bytes(head[: limits.output_bytes]) for head in heads)
    return Ran(out, err, code if code >= 0 else 128 - code, late, flooded)


async def _head(stream: asyncio.StreamReader, head: bytearray, most: int) -> bool:
    """Read into `head`; whether the stream ended within `most` bytes."""
    while len(head) <= most:
        chunk = await stream.read(1 << 16)
        if not chunk:
            return True
        head += chunk
    return False


def _check(report: int, ran: Ran) -> None:
    """Raises JailError unless the jail said that the program was confined."""
    os.set_blocking(report, False)
    try:
        said = os.read(report, 1 << 16)
    except BlockingIOError:
        said = b""
    if said == b'{"ready": true}':
        return
    why = json.loads(said)["failed"] if said else ran.stderr.decode("utf-8", "replace").strip()[-500:]
    raise JailError(why or ("not ready within its deadline" if ran.late else f"ended with code {ran.code}"))
