"""The interface of sandboxes: settings, limits, and the outcome of one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from protocol.settings import Settings


class SandboxBase(Settings):
    """What the settings of every sandbox have."""

    type: str


class BubblewrapSettings(SandboxBase):
    """On this machine, by bubblewrap (`bwrap` 0.8 or newer): Linux namespaces and resource limits."""

    type: Literal["bubblewrap"] = "bubblewrap"


class ServiceSettings(SandboxBase):
    """A sandbox service with SandboxFusion's HTTP API. How well it isolates programs is its operator's business."""

    type: Literal["service"] = "service"
    url: str = Field(pattern=r"^https?://")
    """Base address; programs go to `{url}/run_code`."""
    wait_s: float = Field(default=30.0, ge=0)
    """Longest wait for the answer beyond the program's own deadline, in seconds: the service's queue, and retries."""
    attempts: int = Field(default=3, ge=1)
    """Most attempts while the service cannot be reached or is overloaded."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program. Seconds, MiB (1 << 20 bytes), bytes.

    memory_mb     address space of each process
    file_mb       all files together
    threads       threads and processes together
    output_bytes  of stdout and of stderr
    """

    wall_s: float
    cpu_s: int
    memory_mb: int
    file_mb: int
    threads: int
    output_bytes: int


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    stdout, stderr   the first `output_bytes` of each
    code             exit code; above 128: killed by that signal
    timed_out        it was ended at the deadline
    output_exceeded  it wrote more than `output_bytes`
    """

    stdout: bytes
    stderr: bytes
    code: int
    timed_out: bool = False
    output_exceeded: bool = False


class SandboxError(Exception):
    """The sandbox or its service failed; the program was not run, or its outcome is not known."""


class Sandbox(Protocol):
    """Runs programs that cannot be trusted. Built once per tool, outside an event loop."""

    async def run(self, source: str) -> ProgramResult:
        """Run `source` as a Python program, from nothing. Ends in bounded time; nothing of the program is left then.

        Raises SandboxError.
        """
        ...

    async def close(self) -> None:
        """Close connections. Safe to call twice."""
        ...
