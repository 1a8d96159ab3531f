"""`<python> program </python>`: a Python program in a sandbox, without network, files of the host or privileges.

Each program starts from nothing: no variable and no file of an earlier one is left. The policy sees what it printed. A
program that raises, runs too long or wants too much memory is the policy's mistake, and the policy sees that; a sandbox
that fails is the tool's error `sandbox`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from rollout_server.tools.base import InflightCalls, ToolResult, ToolSettingsBase
from rollout_server.tools.sandbox import SandboxSettings, build_sandbox
from rollout_server.tools.sandbox.base import BubblewrapSettings, ProgramResult, Sandbox, SandboxError, SandboxLimits

log = logging.getLogger(__name__)

MAX_SOURCE_CHARS = 64 << 10
ERROR_CHARS = 1000
"""Characters of stderr that are shown, from its end: the end of a traceback says most."""
SIGXCPU = 128 + 24
_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)


class PythonSettings(ToolSettingsBase):
    """A sandboxed Python interpreter."""

    sentence: ClassVar[str] = (
        "You can compute by <python> program </python>: the Python program runs without network and without the files "
        "or variables of an earlier one, and what it prints will be returned between {open} and {close}."
    )

    type: Literal["python"] = "python"
    sandbox: SandboxSettings = BubblewrapSettings()
    """What isolates programs: bubblewrap on this machine, or a service over HTTP."""
    deadline_s: float = Field(default=5.0, gt=0)
    """Longest run of one program in seconds, its start included."""
    cpu_s: int = Field(default=5, ge=1)
    """Processor seconds of each process of a program (bubblewrap)."""
    memory_mb: int = Field(default=512, ge=128)
    """Address space of each process of a program in MiB, the interpreter included."""
    file_mb: int = Field(default=16, ge=1)
    """All files of a program together in MiB (bubblewrap)."""
    threads: int = Field(default=16, ge=1)
    """Threads and processes of one program together (bubblewrap)."""
    max_output_chars: int = Field(default=4000, ge=1)
    """Most characters of output. A program that writes more is ended, and the rest is not shown."""
    concurrency: int = Field(default=4, ge=1)
    """Programs that run at once in this process; further calls wait in line."""
    wait_s: float = Field(default=60.0, gt=0)
    """Longest wait in that line in seconds; after it the call fails as `overloaded`."""
    libraries: tuple[Path, ...] = ()
    """Directories whose modules programs may import besides the standard library, e.g. a site-packages with numpy. They
    may read all that is in there (bubblewrap)."""


class Python:
    """Runs programs in the sandbox that the settings select. Raises UserError where there is none.

    urls  not used
    """

    name = "python"

    def __init__(self, settings: PythonSettings, urls: Sequence[str] = ()) -> None:
        self._settings = settings
        self._sandbox = sandbox_for(settings)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._calls = InflightCalls(self.name)

    async def __call__(self, argument: str) -> ToolResult:
        if len(argument) > MAX_SOURCE_CHARS:
            return ToolResult(f"The program is longer than {MAX_SOURCE_CHARS} characters.", mistake="too_long")
        return await self._calls.run(self._run(program_of(argument)))

    async def close(self) -> None:
        await self._calls.close()
        await self._sandbox.close()

    async def _run(self, source: str) -> ToolResult:
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await self._slots.acquire()
        except TimeoutError:
            return ToolResult(error="overloaded")
        try:
            return describe(await self._sandbox.run(source), self._settings)
        except SandboxError as error:
            log.error("no program is run: %s", error)
            return ToolResult(error="sandbox")
        finally:
            self._slots.release()


def program_of(argument: str) -> str:
    """Return the program in an argument, without the fence or the indentation that models put around it."""
    fenced = _FENCED.fullmatch(argument)
    return textwrap.dedent(fenced[1] if fenced else argument.strip("\n")).strip() + "\n"


def describe(result: ProgramResult, settings: PythonSettings) -> ToolResult:
    """Return what the policy is shown of a run: the output, then how it ended if not well."""
    most = settings.max_output_chars
    printed = result.stdout.decode("utf-8", "replace").strip("\n")[:most]
    raised = result.stderr.decode("utf-8", "replace").strip()[-ERROR_CHARS:]
    mistake, ending = "", ""
    if result.timed_out:
        mistake, ending = "too_slow", f"The program was stopped after {settings.deadline_s:g} seconds."
    elif result.output_exceeded:
        mistake, ending = "too_much_output", f"The program was stopped: it wrote more than {most} characters."
    elif result.code == SIGXCPU:
        mistake, ending = "too_slow", f"The program was stopped after {settings.cpu_s} seconds of processor time."
    elif result.code > 128:
        mistake, ending = "killed", f"The program was killed by signal {result.code - 128}."
    elif result.code:
        mistake = "raised"
    parts = [part for part in (printed, raised, ending) if part]
    return ToolResult("\n".join(parts) or "The program printed nothing.", mistake=mistake)


def sandbox_for(settings: PythonSettings) -> Sandbox:
    """Build the sandbox of the tool. Raises UserError when programs cannot be isolated."""
    limits = SandboxLimits(
        wall_s=settings.deadline_s,
        cpu_s=settings.cpu_s,
        memory_mb=settings.memory_mb,
        file_mb=settings.file_mb,
        threads=settings.threads,
        output_bytes=4 * settings.max_output_chars,
    )
    return build_sandbox(settings.sandbox, limits, [str(path.resolve()) for path in settings.libraries])
