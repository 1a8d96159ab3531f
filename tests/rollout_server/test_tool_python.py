"""`python`: the observations after programs, and failures of the sandbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import UserError
from rollout_server.tools import build_tool
from rollout_server.tools import python as python_tool
from rollout_server.tools.base import Tool
from rollout_server.tools.python import MAX_SOURCE_CHARS, Python, PythonSettings, describe, program_of
from rollout_server.tools.sandbox.base import ProgramResult, SandboxError
from rollout_server.tools.sandbox.bubblewrap import Bubblewrap
from tests.support.sandboxes import require_bubblewrap

SETTINGS = PythonSettings(deadline_s=30, memory_mb=256)


@pytest.fixture
async def python() -> AsyncIterator[Tool]:
    require_bubblewrap()
    tool = Python(SETTINGS)
    yield tool
    await tool.close()


@pytest.mark.parametrize(
    ("argument", "program"),
    [
        ("print(1)", "print(1)\n"),
        ("\n    x = 1\n    print(x)\n", "x = 1\nprint(x)\n"),
        ("\nif x:\n    y()\n", "if x:\n    y()\n"),
        ("\n```python\nprint(1)\n```\n", "print(1)\n"),
        ("```\n  a\n  b\n```", "a\nb\n"),
        ("print('```')", "print('```')\n"),
    ],
)
def test_the_program_is_what_a_model_means(argument: str, program: str) -> None:
    assert program_of(argument) == program


@pytest.mark.parametrize(
    ("result", "text", "mistake"),
    [
        (ProgramResult(b"1\n2\n", b"", 0), "1\n2", ""),
        (ProgramResult(b"", b"", 0), "The program printed nothing.", ""),
        (ProgramResult(b"1\n", b"a warning\n", 0), "1\na warning", ""),
        (ProgramResult(b"1\n", b"Traceback\nKeyError: 1\n", 1), "1\nTraceback\nKeyError: 1", "raised"),
        (ProgramResult(b"1", b"", 143, timed_out=True), "1\nThe program was stopped after 30 seconds.", "too_slow"),
        (ProgramResult(b"x" * 9999, b"", 143, output_exceeded=True), "x" * 4000 + "\nThe program was stopped: it wrote more than 4000 characters.", "too_much_output"),  # noqa: E501
        (ProgramResult(b"", b"", 152), "The program was stopped after 30 seconds of processor time.", "too_slow"),
        (ProgramResult(b"", b"", 139), "The program was killed by signal 11.", "killed"),
        (ProgramResult(b"", b"", 128), "The program printed nothing.", "raised"),
        (ProgramResult(b"", b"", 129), "The program was killed by signal 1.", "killed"),
        (ProgramResult(b"\xff\xfe", b"", 0), "\ufffd\ufffd", ""),
        (ProgramResult(b"", b"x" * 5000 + b"end", 1), "x" * 997 + "end", "raised"),
    ],
)  # fmt: skip
def test_how_a_program_ended_is_said_in_words(result: ProgramResult, text: str, mistake: str) -> None:
    said = describe(result, SETTINGS)
    assert (said.text, said.mistake, said.error, said.passages) == (text, mistake, "", ())


async def test_it_computes(python: Tool) -> None:
    result = await python("\n```python\nimport math\nprint(math.comb(40, 20))\n```\n")
    assert (result.text, result.mistake, result.error) == ("137846528820", "", "") and result.latency_s > 0


@pytest.mark.parametrize(
    ("program", "said", "mistake"),
    [
        (
            "print(1)\nint('x')",
            '1\nTraceback (most recent call last):\n  File "program.py", line 2, in <module>',
            "raised",
        ),
        ("def f(:", "SyntaxError: invalid syntax", "raised"),
        ("import json; json.loads('{')", "json.decoder.JSONDecodeError", "raised"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'", "raised"),
        ("import rollout_server", "ModuleNotFoundError", "raised"),
        ("input()", "EOFError", "raised"),
        ("import sys; sys.exit(3)", "The program printed nothing.", "raised"),
        ("def f(): f()\nf()", "RecursionError", "raised"),
        ("x = bytearray(1 << 40)", "MemoryError", "raised"),
        ("import os; os.abort()", "The program was killed by signal 6.", "killed"),
        ("print('\\udfff \\x00')", "\\udfff \x00", ""),
        ("\x00", "null bytes", "raised"),
    ],
)
async def test_what_a_program_does_wrong_is_its_policys_mistake(
    python: Tool, program: str, said: str, mistake: str
) -> None:
    result = await python(program)
    assert (result.mistake, result.error) == (mistake, "")
    assert said in result.text and "/" not in result.text, "no path of this machine is shown"


async def test_the_length_of_a_program_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Echo:
        async def run(self, source: str) -> ProgramResult:
            ran.append(source)
            return ProgramResult(b"1", b"", 0)

        async def close(self) -> None:
            pass

    monkeypatch.setattr(python_tool, "sandbox_for", lambda settings: Echo())
    tool = Python(SETTINGS)
    assert (await tool("x" * MAX_SOURCE_CHARS)).text == "1" and ran == ["x" * MAX_SOURCE_CHARS + "\n"]
    refused = await tool("x" * (MAX_SOURCE_CHARS + 1))
    assert (refused.mistake, refused.error) == ("too_long", "") and str(MAX_SOURCE_CHARS) in refused.text
    assert len(ran) == 1
    await tool.close()


async def test_no_more_programs_run_at_once_than_are_allowed_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_bubblewrap()
    monkeypatch.setattr(python_tool, "WAIT_S", 0.3)
    tool = Python(SETTINGS.model_copy(update={"concurrency": 1}))
    slow = asyncio.create_task(tool("import time; time.sleep(5)"))
    await asyncio.sleep(0.05)
    assert (await tool("print(1)")).error == "overloaded"
    started = time.monotonic()
    await tool.close()
    assert (await slow).error == "closed" and time.monotonic() - started < 3


async def test_a_sandbox_that_fails_is_the_tools_failure(
    python: Tool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def cannot(*_: object) -> ProgramResult:
        raise SandboxError("bwrap: Operation not permitted")

    monkeypatch.setattr(Bubblewrap, "run", cannot)
    result = await python("print(1)")
    assert (result.error, result.mistake, result.text) == ("sandbox", "", "")
    assert "Operation not permitted" in caplog.text


async def test_libraries_that_settings_name_can_be_imported(tmp_path: Path) -> None:
    require_bubblewrap()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "calculus.py").write_text("ANSWER = 42\n")
    tool = build_tool(PythonSettings(libraries=(tmp_path / "mine",), deadline_s=30), ())
    result = await tool("import calculus; print(calculus.ANSWER)\nopen(calculus.__file__, 'w')")
    await tool.close()
    assert result.text.startswith("42\n") and result.mistake == "raised"
    assert (tmp_path / "mine" / "calculus.py").read_text() == "ANSWER = 42\n"


def test_a_machine_without_a_sandbox_cannot_have_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no sandbox on this machine"):
        build_tool(PythonSettings(), ())
