"""The engine's command: fast help, errors with advice, no key on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import UserError
from rollout_server.cpu_engine.config import EngineSettings, parse, read_keys


def command(*flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "rollout_server.cpu_engine", *flags]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, timeout=60)


def test_help_names_every_flag(tmp_path: Path) -> None:
    shown = command("--help", cwd=tmp_path)
    assert shown.returncode == 0
    for name in EngineSettings.model_fields:
        assert "--" + name.replace("_", "-") in shown.stdout


def test_parsing_imports_neither_torch_nor_aiohttp_nor_transformers() -> None:
    code = (
        "import sys; from rollout_server.cpu_engine.__main__ import parse; parse(['--model-path', 'x']);"
        "print([m for m in ('torch', 'aiohttp', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_missing_model_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    answer = command("--model-path", str(tmp_path / "nothing"), "--port", "0", cwd=tmp_path)
    assert answer.returncode == 2
    assert "config.json" in answer.stderr and "do:" in answer.stderr and "Traceback" not in answer.stderr


@pytest.mark.parametrize("flags", [["--port", "70000"], ["--threads", "0"], ["--dtype", "int8"], ["--no-such", "1"]])
def test_a_wrong_flag_ends_with_code_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--model-path", "x", *flags])
    assert ended.value.code == 2
    assert flags[0].removeprefix("--") in capsys.readouterr().err.replace("_", "-")


def test_keys_come_from_the_named_variables_only() -> None:
    settings = parse(["--model-path", "x", "--api-key-env", "A", "--admin-api-key-env", "B"])
    assert read_keys(settings, {"A": "one", "B": " two\n"}) == ("one", "two")
    with pytest.raises(UserError, match="B is not set"):
        read_keys(settings, {"A": "one"})


def test_listening_beyond_this_machine_needs_a_key() -> None:
    with pytest.raises(UserError, match="without an API key"):
        read_keys(parse(["--model-path", "x", "--host", "0.0.0.0"]), {})
    read_keys(parse(["--model-path", "x", "--host", "0.0.0.0", "--api-key-env", "A"]), {"A": "k"})
