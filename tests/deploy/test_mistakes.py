"""Common mistakes: each gets an error with a fix, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import BENCHMARKS
from foray.cli import MEANT, VERBS, main
from foray.commands import index
from foray.commands.init import presets
from protocol.runtime.files import is_full
from protocol.runtime.log import LOG_LEVEL_VARIABLE, start_logging


def err_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    "argv",
    [
        ["redis", "--dir", "/proc/x", "--port", "0"],
        ["init", "/proc/x/run.yaml"],
        ["demo", "--dir", "/proc/xx"],
        ["up", "/proc/version/run.yaml"],
    ],
)
def test_an_unusable_path_is_an_error_of_three_lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    err = err_of(capsys, *argv)
    assert "/proc/" in err and "why:" in err and len(err.splitlines()) <= 3


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("train", "`foray up run.yaml`"),
        ("generate", "`foray chat RUN_DIR`"),
        ("infer", "`foray serve RUN_DIR`"),
        ("tail", "foray logs RUN_DIR"),
        ("stop", "`foray down RUN_DIR`"),
        ("stauts", "did you mean `foray status`?"),
        ("xyzzy", "`foray --help` lists the commands"),
    ],
)
def test_a_command_of_another_program_is_answered_with_ours(
    verb: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in err_of(capsys, verb)


def test_no_alias_hides_a_command() -> None:
    assert not {name for names in MEANT.values() for name in names} & VERBS.keys()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["up", "{dir}/run.yaml", "foo"], ["'foo' is not of the form key=value", "learner.optim.lr=1e-4"]),
        (["up"], ["needs a configuration", "foray init run.yaml"]),
        (["up", "{dir}/run.yaml", "--dryrun"], ["--dryrun", "did you mean '--dry-run'?"]),
        (["eval", "{dir}", "--questions", "{dir}/nope"], ["cannot read the questions", "--suite"]),
        (["index", "search", "{dir}", "q"], ["is not a built index", "foray index build --corpus"]),
        (["index", "serch", "{dir}", "q"], ["`foray index serch`", "did you mean 'search'?"]),
        (["index"], ["needs a subcommand", "build, estimate, info, verify, search"]),
        (["init", "{dir}/new.yaml", "--preset", "serch_r1_grpo"], ["--preset", "did you mean 'search_r1_grpo'?"]),
        (["bench", "rolout"], ["`foray bench rolout`", "did you mean 'rollout'?"]),
        (["dlq", "lst"], ["unknown value 'lst'", "did you mean 'list'?"]),
        (["--log-level", "loud", "version"], ["unknown --log-level 'LOUD'", "DEBUG"]),
    ],
)
def test_the_advice_leads_to_what_exists(
    argv: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("run: {}\n")
    err = err_of(capsys, *(arg.replace("{dir}", str(tmp_path)) for arg in argv))
    assert all(word in err for word in words), err
    assert len(err.splitlines()) <= 4, "the point, not the usage of every flag"


def test_every_preset_is_known_to_the_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = err_of(capsys, "init", str(tmp_path / "new.yaml"), "--preset", "xyzzy")
    assert all(name in err for name in presets())


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_help_of_a_subcommand_has_its_own_flags_only(capsys: pytest.CaptureFixture[str]) -> None:
    build = help_of(capsys, "index", "build")
    assert build.startswith("usage: foray index build") and "--overwrite" in build
    assert not [flag for flag in ("--full", "--dim", "--passages", "--json") if flag in build]
    assert "--overwrite" not in help_of(capsys, "index", "verify")
    rollout = help_of(capsys, "bench", "rollout")
    assert rollout.startswith("usage: foray bench rollout") and len(rollout.splitlines()) < 60
    assert all(name in help_of(capsys, "bench") for name in BENCHMARKS)
    assert all(name in help_of(capsys, "index") for name in index.subcommands())


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.process])
def test_a_process_is_called_as_it_was_started(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(capsys, verb).startswith(f"usage: foray {verb} ")


@pytest.mark.parametrize("verb", ["up", "doctor", "status", "top", "dlq", "learner", "rollout", "engine", "retriever"])
def test_configuration_and_overrides_are_given_to_all_in_the_same_way(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("runn: {}\n")
    action = ["list"] if verb == "dlq" else []
    for given in (["--config", f"{tmp_path}/run.yaml"], [f"{tmp_path}/run.yaml"]):
        # read, and refused for what is in it
        assert "unknown section 'runn'" in err_of(capsys, verb, *action, *given, "run.steps=3")


def test_a_log_level_reaches_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging

    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "INFO")
    assert main(["version", "--json", "--log-level", "warning"]) == 0
    assert json.loads(capsys.readouterr().out)["foray"]
    assert os.environ[LOG_LEVEL_VARIABLE] == "WARNING"
    given: dict[str, object] = {}
    monkeypatch.setattr(logging, "basicConfig", given.update)
    start_logging(os.environ, "%(message)s")
    assert given["level"] == "WARNING"
    with pytest.raises(OSError, match="proc"):
        main(["-v", "init", "/proc/x/run.yaml"])


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without a free byte."""
    place = tmp_path / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    try:
        with pytest.raises(OSError), (place / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"f" * 4096)
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_one_line_and_leaves_no_partial_file(
    full_disk: Path, run_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_files / "metrics.jsonl"
    run.write_text('{"step": 1, "epoch": 1, "reward/em": 0.25}\n')
    corpus, questions = str(run_files / "corpus.jsonl"), str(run_files / "questions.jsonl")
    for argv in (
        ["init", str(full_disk / "run.yaml")],
        ["data", "convert", corpus, str(full_disk / "c.jsonl"), "--corpus"],
        ["data", "convert", questions, str(full_disk / "q.jsonl")],
        ["curves", str(run_files), "--plot", str(full_disk / "x.svg")],
    ):
        err = err_of(capsys, *argv)
        assert "the disk is full" in err and "free disk space" in err, (argv, err)
        assert {path.name for path in full_disk.iterdir() if path.is_file()} == {"filler"}, argv


def test_numpy_reports_a_full_disk_without_a_number() -> None:
    assert is_full(OSError("898195 requested and 158688 written")) and not is_full(OSError("1 requested"))


@pytest.mark.parametrize("flags", [["--n", "0"], ["--temperature", "-1"], ["--top-p", "3"], ["--top-p", "0"]])
def test_sampling_that_is_impossible_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert "cannot be sampled" in err_of(capsys, "eval", str(tmp_path), "--suite", "none.jsonl", *flags)
