"""The `foray` command, used by a user and by a script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from deploy.config import load_config
from deploy.launch.process import ProcessFailed
from foray.cli import VERBS, main
from foray.commands import version
from protocol.errors import Fenced, ForayError, NoSignal

HEAVY = ("torch", "aiohttp", "transformers", "deepspeed", "faiss", "redis")
PROBE = (
    "import sys\n"
    "from foray.cli import main\n"
    "try:\n    code = main(sys.argv[1:])\n"
    "except SystemExit as e:\n    code = e.code or 0\n"
    f"print('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])\n"
    "sys.exit(code)"
)
EVERY_HELP = (
    "import sys\n"
    "from foray.cli import VERBS, main\n"
    "for verb in VERBS:\n"
    "    try:\n        code = main([verb, '--help'])\n"
    "    except SystemExit as e:\n        code = e.code\n"
    "    assert not code, (verb, code)\n"
    f"    assert not [m for m in {HEAVY!r} if m in sys.modules], verb\n"
)
SETTINGS = ("deploy.config", "learner.config.learner", "retriever.config", "rollout_server.config")
QUICK_HELP = (
    "import sys\n"
    "from foray.cli import main\n"
    "for verb, numpy in (('up', False), ('bench', False), ('status', True)):\n"
    "    try:\n        code = main([verb, '--help'])\n"
    "    except SystemExit as e:\n        code = e.code\n"
    f"    loaded = set(sys.modules) & {{*{SETTINGS!r}, *(() if numpy else ('numpy',))}}\n"
    "    assert not code and not loaded, (verb, code, loaded)\n"
)


def foray(*argv: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command; stdout ends with the heavy modules that it imported."""
    done = subprocess.run([sys.executable, "-c", PROBE, *argv], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_help_of_every_command_answers_without_a_framework() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") >= len(VERBS)


def test_help_of_what_is_typed_most_reads_no_settings_of_services() -> None:
    """They and numpy take more than half of the time to the first line."""
    done = subprocess.run([sys.executable, "-c", QUICK_HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_overview_names_every_command() -> None:
    code, out, _ = foray("--help")
    assert code == 0 and all(f"  {verb} " in out for verb in VERBS)
    assert foray()[0] == 2, "nothing asked for is a usage error"


@pytest.mark.slow
def test_a_dry_run_prints_settings_and_processes_without_a_framework(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"run: {{dir: {tmp_path}/none, steps: 7}}\n")
    code, out, err = foray("up", str(config), "launch.engines=2", "launch.eval_engines=1", "--dry-run")
    assert code == 0, err
    assert (
        "steps: 7" in out
        and "#   engine-2: " in out
        and "#   eval-engine-1: " in out
        and out.splitlines()[-1] == "LOADED"
    )
    assert not (tmp_path / "none").exists(), "a dry run leaves nothing behind"
    report = json.loads(foray("up", str(config), "--dry-run", "--json")[1].splitlines()[0])
    assert [p["name"] for p in report["processes"]] == ["redis", "retriever-1", "engine-1", "rollout-1", "learner"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["stauts"], ["unknown command 'stauts'", "did you mean `foray status`?"]),
        (["up", "{dir}/hotpot.yml"], ["cannot read the configuration file", "hotpot.yaml?"]),
        (
            ["up", "{dir}/hotpot.yaml", "--dry-run", "run.stepps=3"],
            ["unknown key 'run.stepps'", "did you mean 'steps'?"],
        ),
        (["up", "{dir}/hotpot.yaml", "--dry-run", "run.steps=none"], ["run.steps", "valid integer"]),
        (["status", "{dir}/none"], ["{dir}/none does not exist", "give the directory"]),
        (["down", "{dir}/sub"], ["is not a run directory"]),
        (["replay", "{dir}/sub"], ["is not a run directory"]),
        (["eval", "{dir}", "--questions", "{dir}/none.jsonl"], ["cannot read the questions"]),
        (["index", "build"], ["no corpus or no output directory is given", "--corpus FILE and --out DIR"]),
        (["init", "{dir}/hotpot.yaml"], ["already exists", "--force"]),
    ],
)
def test_a_mistake_answers_at_once_with_what_happened_and_what_to_do(
    argv: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hotpot.yaml").write_text("run: {}\n")
    (tmp_path / "sub").mkdir()
    code = main([arg.replace("{dir}", str(tmp_path)) for arg in argv])
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err
    assert all(word.replace("{dir}", str(tmp_path)) in err for word in words), err


def test_a_wrong_flag_is_a_usage_error(tmp_path: Path) -> None:
    assert foray("up", str(tmp_path), "--dryrun")[0] == 2


def test_init_writes_a_file_that_up_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    assert main(["init", str(path), "run.steps=3"]) == 0
    assert main(["up", str(path), "--dry-run"]) == 0
    assert "steps: 3" in capsys.readouterr().out


def test_init_gives_a_run_a_unique_id_and_directory_unless_they_are_set(tmp_path: Path) -> None:
    made = []
    for name, given in (("a", []), ("b", []), ("c", ["run.id=mine"]), ("d", ["--preset", "ema_pg", "run.dir=/x"])):
        path = tmp_path / f"{name}.yaml"
        assert main(["init", str(path), *given]) == 0
        made.append(load_config(path).run)
    ids = [run.id for run in made]
    assert len({*ids}) == 4 and [run_id.rpartition("-")[0] for run_id in ids] == ["run", "run", "", "ema-pg"]
    assert [str(run.dir) for run in made] == [*(f"runs/{run_id}" for run_id in ids[:3]), "/x"]


def test_index_build_makes_what_the_retriever_of_that_configuration_looks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "contents": '"Emma"\nA novel.'}) + "\n")
    config = tmp_path / "run.yaml"
    config.write_text(f"retriever: {{corpus: {tmp_path}/corpus.jsonl, index_dir: {tmp_path}/index}}\n")
    assert main(["index", "build", "--config", str(config)]) == 0
    assert (tmp_path / "index").is_dir() and str(tmp_path / "index") in capsys.readouterr().out


def test_version_can_be_read_by_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["foray"] and report["python"].startswith("3.")


def test_a_process_verb_is_that_process(tmp_path: Path) -> None:
    code, _, err = foray("retriever", f"retriever.corpus={tmp_path}/none.jsonl", "retriever.port=0")
    assert code == 2 and "none.jsonl" in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            ProcessFailed("learner", "ended", code=65, log=Path("l.log"), tail="no signal"),
            65,
            "error: learner ended\n  |",
        ),
        (ProcessFailed("engine-1", "ended", code=-9, log=Path("e.log"), tail=""), 1, "out-of-memory killer"),
        (Fenced("another learner took over"), 75, "error: another learner took over\n"),
        (NoSignal("nothing can be learned", todo="look"), 65, "do: look"),
        (ForayError("the judge\x1b[2J failed"), 1, "error: the judge\\x1b[2J failed\n"),
    ],
)
def test_an_error_says_what_is_printed_and_the_exit_code(
    error: ForayError, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(version, "run", Mock(side_effect=error))
    assert main(["version"]) == code and said in capsys.readouterr().err
