"""Client of a sandbox service with the HTTP API of SandboxFusion: `POST /run_code`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from protocol.errors import UserError
from protocol.runtime.http.body import parse_json
from protocol.runtime.timing import backoff_s, loop_timeout
from rollout_server.search.base import NO_FILES, OVERLOADED, TIMEOUT, UNREACHABLE, SearchError
from rollout_server.search.transport import HttpConnections
from rollout_server.tools.sandbox.base import ProgramResult, SandboxError, SandboxLimits, ServiceSettings

MAX_BYTES = 16 << 20
"""Maximum size of an answer: the service keeps 1 MiB of each stream, which JSON may expand sixfold."""
BACKOFF_S, MAX_BACKOFF_S = 0.4, 10.0
RETRIED = frozenset({UNREACHABLE, NO_FILES, OVERLOADED, "http_500", "http_502", "http_504"})


class CommandRunResult(BaseModel):
    """Result of one command. There is no `return_code` if it was killed at its time limit."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    """The answer. `SandboxError`: the service failed, with the reason in `message`."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: CommandRunResult | None = None


class SandboxService:
    """Sends each program to the service. Time and memory are limited by the service, the output is cut here."""

    def __init__(self, settings: ServiceSettings, limits: SandboxLimits, libraries: Sequence[str] = ()) -> None:
        if libraries:
            raise UserError(
                "`libraries` cannot be used with a sandbox service",
                why="they are directories of this machine, and the service has its own",
                todo="remove `libraries`, or set `sandbox: {type: bubblewrap}`",
            )
        self._settings, self._limits = settings, limits
        self._url = settings.url.rstrip("/") + "/run_code"
        self._connections = HttpConnections(max_bytes=MAX_BYTES)

    async def run(self, source: str) -> ProgramResult:
        """Run a program, see `Sandbox`. It may run more than once if the service fails meanwhile."""
        body = {
            "code": source.encode("utf-8", "replace").decode(),
            "language": "python",
            "run_timeout": self._limits.wall_s,
            "memory_limit_MB": self._limits.memory_mb,
        }
        raw = await self._post(json.dumps(body).encode())
        try:
            answer = RunCodeResponse.model_validate(parse_json(raw))
        except ValueError as error:
            raise SandboxError(f"{self._url}: the answer is not from a sandbox service") from error
        ran = answer.run_result
        if answer.status == "SandboxError" or ran is None or ran.status == "Error":
            raise SandboxError(f"{self._url}: {(answer.message or 'no result')[:300]}")
        stdout, stderr = ((text or "").encode("utf-8", "replace") for text in (ran.stdout, ran.stderr))
        code, most = ran.return_code or 0, self._limits.output_bytes
        return ProgramResult(
            stdout[:most],
            stderr[:most],
            code if code >= 0 else 128 - code,
            ran.status == "TimeLimitExceeded",
            max(len(stdout), len(stderr)) > most,
        )

    async def _post(self, body: bytes) -> bytes:
        """Return the body of a 200. Retries while the service is unreachable or overloaded. Raises SandboxError."""
        timeout_s, cause = self._limits.wall_s + self._settings.wait_s, TIMEOUT
        with contextlib.suppress(TimeoutError):
            async with loop_timeout(timeout_s):
                for attempt in range(1, self._settings.attempts + 1):
                    try:
                        return (await self._connections.exchange("POST", self._url, timeout_s, body))[1]
                    except SearchError as error:
                        cause, wait_s = error.cause, error.retry_after_s
                    if cause not in RETRIED or attempt == self._settings.attempts:
                        break
                    # jitter: thousands of trajectories must not retry at once
                    pause_s = random.uniform(0.5, 1.0) * backoff_s(attempt, BACKOFF_S, MAX_BACKOFF_S)
                    await asyncio.sleep(max(wait_s, pause_s))
        raise SandboxError(f"{self._url}: {cause}")

    async def close(self) -> None:
        await self._connections.close()
