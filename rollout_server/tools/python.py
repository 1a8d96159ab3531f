"""`<python> program </python>`: run a Python program in a sandbox, without network, host files or privileges.

Programs share no state: no variables or files of earlier ones. The policy sees the output. A program that raises, runs
too long or needs too much memory is a mistake of the policy, which sees an error text; a failure of the sandbox is the
tool's error `sandbox`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from protocol.runtime.timing import loop_timeout
from rollout_server.tools.base import InflightCalls, ToolResult, ToolSettingsBase
from rollout_server.tools.sandbox import SandboxSettings, build_sandbox
from rollout_server.tools.sandbox.base import BubblewrapSettings, ProgramResult, Sandbox, SandboxError, SandboxLimits

log = logging.getLogger(__name__)

MAX_SOURCE_CHARS = 64 << 10
ERROR_CHARS = 1000
"""Number of characters of stderr that are shown, from its end: the end of a traceback is the most useful part."""
FILE_MB = 16
"""Size limit of all files of a program together, in MiB: they are in memory (bubblewrap)."""
THREADS = 16
"""Maximum number of threads and processes of a program: libraries start some (bubblewrap)."""
MAX_OUTPUT_CHARS = 4000
"""Maximum characters of output, beyond any `max_obs_tokens`; a program that writes more is killed."""
WAIT_S = 60.0
"""Timeout of a call that waits for others, in seconds; then it fails as `overloaded`."""
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
    """Sandbox: bubblewrap on this machine, or a service over HTTP."""
    deadline_s: float = Field(default=5.0, gt=0)
    """Timeout of a program in seconds, including its start. Each of its processes may use as much processor time."""
    memory_mb: int = Field(default=512, ge=128)
    """Address space limit of each process of a program, in MiB, including the interpreter."""
    concurrency: int = Field(default=4, ge=1)
    """Maximum number of programs that run at the same time in this process. Further calls are queued."""
    libraries: tuple[Path, ...] = ()
    """Directories with modules that programs may import besides the standard library, e.g. a site-packages with numpy.
    Programs can read everything in them (bubblewrap)."""


class Python:
    """Runs programs in the selected sandbox. Raises UserError if it is not available.

    urls  not used
    """

    name = "python"

    def __init__(self, settings: PythonSettings, urls: Sequence[str] | None = None) -> None:
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
            async with loop_timeout(WAIT_S):
                await self._slots.acquire()
        except TimeoutError:
            return ToolResult(error="overloaded")
        try:
            return describe(await self._sandbox.run(source), self._settings)
        except SandboxError as error:
            log.error("could not run the program: %s", error)
            return ToolResult(error="sandbox")
        finally:
            self._slots.release()


def program_of(argument: str) -> str:
    """Return the program in an argument, without the code fence or the indentation that models add."""
    fenced = _FENCED.fullmatch(argument)
    return textwrap.dedent(fenced[1] if fenced else argument.strip("\n")).strip() + "\n"


def describe(result: ProgramResult, settings: PythonSettings) -> ToolResult:
    """Return the result for the policy: the output, then the failure, if any."""
    printed = result.stdout.decode("utf-8", "replace").strip("\n")[:MAX_OUTPUT_CHARS]
    raised = result.stderr.decode("utf-8", "replace").strip()[-ERROR_CHARS:]
    mistake, ending = "", ""
    if result.timed_out:
        mistake, ending = "too_slow", f"The program was stopped after {settings.deadline_s:g} seconds."
    elif result.output_exceeded:
        mistake, ending = (
            "too_much_output",
            f"The program was stopped: it wrote more than {MAX_OUTPUT_CHARS} characters.",
        )
    elif result.code == SIGXCPU:
        mistake, ending = (
            "too_slow",
            f"The program was stopped after {math.ceil(settings.deadline_s)} seconds of processor time.",
        )
    elif result.code > 128:
        mistake, ending = "killed", f"The program was killed by signal {result.code - 128}."
    elif result.code:
        mistake = "raised"
    parts = [part for part in (printed, raised, ending) if part]
    return ToolResult("\n".join(parts) or "The program printed nothing.", mistake=mistake)


def cpu_s(settings: PythonSettings) -> int:
    """Return the processor time of each process of a program, in seconds (bubblewrap)."""
    return math.ceil(settings.deadline_s)


def sandbox_for(settings: PythonSettings) -> Sandbox:
    """Build the sandbox of the tool. Raises UserError if programs cannot be isolated."""
    limits = SandboxLimits(
        wall_s=settings.deadline_s,
        cpu_s=cpu_s(settings),
        memory_mb=settings.memory_mb,
        file_mb=FILE_MB,
        threads=THREADS,
        output_bytes=4 * MAX_OUTPUT_CHARS,
    )
    return build_sandbox(settings.sandbox, limits, [str(path.resolve()) for path in settings.libraries])
