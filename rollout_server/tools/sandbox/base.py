"""The sandbox interface: settings, limits, and the result of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from protocol.settings import Settings


class SandboxBase(Settings):
    """Base of all sandbox settings."""

    type: str


class BubblewrapSettings(SandboxBase):
    """On this machine with bubblewrap (`bwrap` 0.8 or newer): Linux namespaces and resource limits."""

    type: Literal["bubblewrap"] = "bubblewrap"


class ServiceSettings(SandboxBase):
    """A sandbox service with SandboxFusion's HTTP API. The isolation of programs depends on its operator."""

    type: Literal["service"] = "service"
    url: str = Field(pattern=r"^https?://")
    """Base URL; programs are sent to `{url}/run_code`."""
    wait_s: float = Field(default=30.0, ge=0)
    """Extra time for the answer in seconds, beyond the timeout of the program: queueing in the service, and retries."""
    attempts: int = Field(default=3, ge=1)
    """Maximum attempts while the service is unreachable or overloaded."""


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
    timed_out        it was killed at the timeout
    output_exceeded  it wrote more than `output_bytes`
    """

    stdout: bytes
    stderr: bytes
    code: int
    timed_out: bool = False
    output_exceeded: bool = False


class SandboxError(Exception):
    """The sandbox or its service failed. The program was not run, or its result is unknown."""


class Sandbox(Protocol):
    """Runs untrusted programs. Created once per tool, outside an event loop."""

    async def run(self, source: str) -> ProgramResult:
        """Run `source` as a Python program without state. Returns in bounded time; no process or file remains.

        Raises SandboxError.
        """

    async def close(self) -> None:
        """Close connections. Safe to call twice."""
