"""`<python> program </python>`: a Python program in a process of its own, without network, files or privileges.

What holds, and by which mechanism, is in `tools/jail/__init__.py`; which mechanisms this machine has is tried out when
the tool is built (`mechanisms.py`), and what was found then holds for every call or nothing is run. Each program starts
from nothing: no variable, no file is left of the call before. What a program prints is what the policy sees; one that
raises, runs too long or wants too much memory is told so, and that is the policy's mistake, not the tool's failure.
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
from rollout_server.tools.sandbox.runner import JailError, Limits, Ran, run_confined

log = logging.getLogger(__name__)

MAX_SOURCE_CHARS = 64 << 10
ERROR_CHARS = 1000
"""Of what a program wrote to stderr, the last so many characters are shown: the end of a traceback says most."""
SIGXCPU = 128 + 24
_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)


class PythonSettings(ToolSettingsBase):
    """A sandboxed Python interpreter."""

    sentence: ClassVar[str] = (
        "You can compute by <python> program </python>: the Python program runs without network and without the files "
        "or variables of an earlier one, and what it prints will be returned between {open} and {close}."
    )

    type: Literal["python"] = "python"
    deadline_s: float = Field(default=5.0, gt=0)
    """Longest run of one program in seconds, its start included."""
    cpu_s: int = Field(default=5, ge=1)
    """Processor seconds of one program."""
    memory_mb: int = Field(default=512, ge=128)
    """Address space of one program in MiB, the interpreter included."""
    file_mb: int = Field(default=16, ge=1)
    """Largest file that a program writes into its own directory in MiB; with namespaces, all its files together."""
    threads: int = Field(default=16, ge=1)
    """Threads of one program, counted where namespaces are; elsewhere its memory bounds them."""
    max_output_chars: int = Field(default=4000, ge=1)
    """Most characters of output. A program that writes more is ended, and the rest is not shown."""
    concurrency: int = Field(default=4, ge=1)
    """Programs that run at once in this process; further calls wait in line."""
    wait_s: float = Field(default=60.0, gt=0)
    """Longest wait in that line in seconds; after it the call fails as `overloaded`."""
    libraries: tuple[Path, ...] = ()
    """Directories whose modules programs may import besides the standard library, e.g. a site-packages with numpy. They
    may read all that is in there."""
    allow_unisolated: bool = False
    """Run programs even where network, files or processes cannot be isolated: they can then do what this server can.
    Only for policies that you trust, or inside a container of their own."""


def build_python(settings: PythonSettings, urls: Sequence[str] = ()) -> Python:
    """Build the tool, without `urls`. Raises UserError where programs cannot be isolated as the settings want it."""
    from rollout_server.tools.sandbox.capabilities import require

    libraries = tuple(str(path.resolve()) for path in settings.libraries)
    mechanisms = require(_limits(settings), libraries, allow_unisolated=settings.allow_unisolated)
    return Python(settings, mechanisms, libraries)


class Python:
    """See the module.

    mechanisms  those that hold on this machine, of namespaces, landlock, seccomp
    """

    name = "python"

    def __init__(self, settings: PythonSettings, mechanisms: Sequence[str], libraries: Sequence[str] = ()) -> None:
        self._settings, self._limits = settings, _limits(settings)
        self._mechanisms, self._libraries = tuple(mechanisms), tuple(libraries)
        self._places = asyncio.Semaphore(settings.concurrency)
        self._calls = InflightCalls(self.name)

    async def __call__(self, argument: str) -> ToolResult:
        if len(argument) > MAX_SOURCE_CHARS:
            return ToolResult(f"The program is longer than {MAX_SOURCE_CHARS} characters.", mistake="too_long")
        return await self._calls.run(self._run(program_of(argument)))

    async def close(self) -> None:
        await self._calls.close()

    async def _run(self, source: str) -> ToolResult:
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await self._places.acquire()
        except TimeoutError:
            return ToolResult(error="overloaded")
        try:
            ran = await run_confined(source, self._limits, self._mechanisms, self._libraries)
        except JailError as error:
            log.error("no program is run: %s", error)
            return ToolResult(error="jail")
        finally:
            self._places.release()
        return describe(ran, self._settings)


def program_of(argument: str) -> str:
    """The program in an argument: without the fence or the indentation that a model likes to put round it."""
    fenced = _FENCED.fullmatch(argument)
    return textwrap.dedent(fenced[1] if fenced else argument.strip("\n")).strip() + "\n"


def describe(ran: Ran, settings: PythonSettings) -> ToolResult:
    """What a run is to the policy: what it printed, then how it ended when that was not well."""
    most = settings.max_output_chars
    printed = ran.stdout.decode("utf-8", "replace").strip("\n")[:most]
    raised = ran.stderr.decode("utf-8", "replace").strip()[-ERROR_CHARS:]
    mistake, ending = "", ""
    if ran.late:
        mistake, ending = "too_slow", f"The program was stopped after {settings.deadline_s:g} seconds."
    elif ran.flooded:
        mistake, ending = "too_much_output", f"The program was stopped: it wrote more than {most} characters."
    elif ran.code == SIGXCPU:
        mistake, ending = "too_slow", f"The program was stopped after {settings.cpu_s} seconds of processor time."
    elif ran.code > 128:
        mistake, ending = "killed", f"The program was killed by signal {ran.code - 128}."
    elif ran.code:
        mistake = "raised"
    parts = [part for part in (printed, raised, ending) if part]
    return ToolResult("\n".join(parts) or "The program printed nothing.", mistake=mistake)


def _limits(settings: PythonSettings) -> Limits:
    return Limits(
        wall_s=settings.deadline_s,
        cpu_s=settings.cpu_s,
        memory_mb=settings.memory_mb,
        file_mb=settings.file_mb,
        threads=settings.threads,
        output_bytes=4 * settings.max_output_chars,
    )
