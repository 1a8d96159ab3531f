"""Programs at a sandbox service: what is sent, and what becomes of each answer.

The service is a double with SandboxFusion's API. Where the published client package (`sandbox-fusion`) is installed,
its models check every request and write every answer; elsewhere the same fields stand here, as documented.
`memory_limit_MB` is a field of the server that the client's model of 0.3.7 lacks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from protocol.errors import UserError
from rollout_server.tools import build_tool
from rollout_server.tools.python import Python, PythonSettings
from rollout_server.tools.sandbox import build_sandbox
from rollout_server.tools.sandbox.base import ProgramResult, Sandbox, SandboxError, SandboxLimits, ServiceSettings
from rollout_server.tools.sandbox.service import BACKOFF_S

try:
    from sandbox_fusion import models
except ImportError:
    models = None

LIMITS = SandboxLimits(wall_s=2.0, cpu_s=5, memory_mb=256, file_mb=4, threads=8, output_bytes=100)


def answer(status: str = "Success", **fields: Any) -> dict[str, Any]:
    """A `RunCodeResponse` whose command ended as `fields` say."""
    result = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "", "stderr": ""} | fields
    body = {"status": status, "message": "", "run_result": result}
    if models is None:
        return body | {"compile_result": None, "executor_pod_name": None, "files": {}}
    return dict(json.loads(models.RunCodeResponse(**body).json()))


class FakeService:
    """`POST /run_code`; gives each of `answers` once, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Any] = [answer(stdout="42\n")]
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: dict[str, str] = {}
        self.app = web.Application()
        self.app.router.add_post("/run_code", self.run_code)

    async def run_code(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if models is not None:
            assert set(body) - {"memory_limit_MB"} <= set(models.RunCodeRequest.__fields__)
            models.RunCodeRequest(**body)
        self.requests.append(body)
        self.times.append(time.monotonic())
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, float):
            await asyncio.sleep(found)
        if isinstance(found, int):
            return web.Response(status=found, headers=self.headers)
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)


@pytest.fixture
async def service() -> AsyncIterator[tuple[FakeService, str]]:
    fake = FakeService()
    async with TestServer(fake.app) as server:
        yield fake, str(server.make_url("/"))


@pytest.fixture
async def sandbox(service: tuple[FakeService, str]) -> AsyncIterator[Sandbox]:
    built = build_sandbox(ServiceSettings(url=service[1], wait_s=0.5), LIMITS)
    yield built
    await built.close()


async def test_a_lone_surrogate_of_a_program_is_output(service: tuple[FakeService, str], sandbox: Sandbox) -> None:
    service[0].answers = [json.dumps(answer() | {"run_result": {"status": "Finished", "stdout": "a\ud83db"}})]
    assert (await sandbox.run("x")).stdout == "a\ufffdb".encode()


async def test_what_is_sent(service: tuple[FakeService, str], sandbox: Sandbox) -> None:
    assert await sandbox.run("print(6 * 7)\n") == ProgramResult(b"42\n", b"", 0)
    assert service[0].requests == [
        {"code": "print(6 * 7)\n", "language": "python", "run_timeout": 2.0, "memory_limit_MB": 256}
    ]


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (answer(stdout="1", stderr="w"), ProgramResult(b"1", b"w", 0)),
        (answer("Failed", return_code=1, stderr="KeyError"), ProgramResult(b"", b"KeyError", 1)),
        (answer("Failed", return_code=-9), ProgramResult(b"", b"", 137)),
        (answer(stdout="x" * 101), ProgramResult(b"x" * 100, b"", 0, output_exceeded=True)),
        (answer(stdout="\u00e9"), ProgramResult(b"\xc3\xa9", b"", 0)),
    ],
)
async def test_what_becomes_of_an_answer(
    service: tuple[FakeService, str], sandbox: Sandbox, body: dict[str, Any], result: ProgramResult
) -> None:
    service[0].answers = [body]
    assert await sandbox.run("x") == result


async def test_a_program_that_runs_too_long(service: tuple[FakeService, str], sandbox: Sandbox) -> None:
    late = answer("Failed")
    late["run_result"] |= {"status": "TimeLimitExceeded", "return_code": None, "stdout": "on"}
    service[0].answers = [late]
    assert await sandbox.run("x") == ProgramResult(b"on", b"", 0, timed_out=True)


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ([{"status": "SandboxError", "message": "no runner", "run_result": None}], "no runner"),
        ([{"status": "Success", "message": ""}], "no result"),
        (["<html>"], "the answer is not from"),
        (["[" * 100_000], "the answer is not from"),
        ([404], "http_404"),
        ([503], "overloaded"),
        ([10.0], "timeout"),
    ],
    ids=["error", "empty", "html", "deep", "404", "503", "slow"],
)
async def test_a_service_that_fails_is_named(
    service: tuple[FakeService, str], sandbox: Sandbox, answers: list[Any], cause: str
) -> None:
    service[0].answers = answers
    with pytest.raises(SandboxError, match=cause) as failed:
        await sandbox.run("x")
    assert service[1] in str(failed.value)


async def test_an_overloaded_service_is_asked_again(service: tuple[FakeService, str], sandbox: Sandbox) -> None:
    service[0].answers = [503, 502, answer(stdout="42\n")]
    assert (await sandbox.run("x")).stdout == b"42\n"
    assert len(service[0].requests) == 3
    first, second, third = service[0].times
    assert second - first >= BACKOFF_S / 2 and third - second >= BACKOFF_S, "half of each pause is random"


async def test_retry_after_of_the_service_is_kept(service: tuple[FakeService, str], sandbox: Sandbox) -> None:
    service[0].answers, service[0].headers = [503, answer()], {"Retry-After": "1"}
    await sandbox.run("x")
    first, second = service[0].times
    assert second - first >= 1.0 > BACKOFF_S


async def test_the_tool_runs_its_programs_there(service: tuple[FakeService, str]) -> None:
    settings = PythonSettings(sandbox=ServiceSettings(url=service[1], attempts=1))
    tool = build_tool(settings, ())
    assert isinstance(tool, Python)
    assert (await tool("\n```python\nprint(6 * 7)\n```")).text == "42"
    service[0].answers = [503]
    assert (await tool("print(1)")).error == "sandbox"
    await tool.close()


def test_libraries_of_this_machine_are_refused(service: tuple[FakeService, str], tmp_path: Any) -> None:
    with pytest.raises(UserError, match="cannot be used with a sandbox service"):
        build_tool(PythonSettings(sandbox=ServiceSettings(url=service[1]), libraries=(tmp_path,)), ())
