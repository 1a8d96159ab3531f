"""What a page says for a machine with GPUs is planned for that machine: its files are not there, its plan is sound."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import deploy.hardware.run
from benchmarks.pages.hardware import SHAPES
from deploy.config import from_tree
from deploy.hardware.inventory import HARDWARE
from foray.cli import main
from foray.commands.init import PRESETS
from protocol.runtime.config import read_tree
from retriever.index.config import IndexSettings
from tests.support.shell_blocks import foray_commands, shell_blocks
from tests.test_pages_commands import PAGES, ROOT

ONE_HOST = [name for name, hosts in HARDWARE.items() if len(hosts) == 1]
ABSENT_HERE = {
    *("run.model", "tokenizer", "learner.questions", "learner.eval.suites", "retriever.index_dir"),
    *("engine", "gpus", "learner.publish"),
}
"""Checks of files, of the GPUs, of SGLang and of a torch for CUDA."""
EXAMPLE = "docs/reproduce-search-r1.md"


def commands(page: str) -> list[list[str]]:
    return list(foray_commands("\n".join(block.text for block in shell_blocks(ROOT / page))))


def profile_of(words: list[str]) -> str:
    return words[words.index("--hardware") + 1] if "--hardware" in words else ""


GPU_PAGES = [page for page in PAGES if any(profile_of(words) in ONE_HOST for words in commands(page))]


def index_of(words: list[str]) -> IndexSettings:
    """Return the settings of `foray index build WORDS`."""
    settings = [word for word in words if re.match(r"[a-z_.]+=", word)]
    tree = [f"retriever.index.type={words[words.index('--index') + 1]}", *(f"retriever.index.{s}" for s in settings)]
    return from_tree(read_tree(None, tree)).retriever.index


def model_for(words: list[str]) -> dict[str, object]:
    """Return config.json of the model that the command is for: the directory's name, else that of the preset."""
    preset = (PRESETS / f"{words[words.index('--preset') + 1]}.yaml").read_text()
    named = words[words.index("--model") + 1] + preset
    return next(shape for name, shape in SHAPES.items() if name.lower() in named.lower())


def planned(page: str, profile: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run the page's `foray init --hardware` for a profile, then each `foray up` of its file as a dry run.

    Returns what each printed, or the refusal of `init`.
    """
    said: list[str] = []
    file = ""
    for words in commands(page):
        if profile_of(words) in ONE_HOST:
            words[words.index("--hardware") + 1] = profile
            model, file = folder / words[words.index("--model") + 1], words[1]
            model.mkdir(parents=True, exist_ok=True)
            (model / "config.json").write_text(json.dumps(model_for(words)))
            (folder / file).unlink(missing_ok=True)
            if main(words):
                return [capsys.readouterr().err]
            said.append(capsys.readouterr().out)
        elif words[0] == "up" and file in words:
            main([*words, *(["--dry-run"] if "--dry-run" not in words else [])])
            said.append("".join(capsys.readouterr()))
    return said


@pytest.fixture
def example_index(monkeypatch: pytest.MonkeyPatch) -> None:
    (build,) = [words for words in commands(EXAMPLE) if words[:2] == ["index", "build"]]
    monkeypatch.setattr(deploy.hardware.run, "built_index", lambda config: index_of(build))


@pytest.mark.parametrize("page", GPU_PAGES)
@pytest.mark.usefixtures("example_index")
def test_every_gpu_block_of_a_page_is_planned_for_its_machine(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (profile,) = {name for words in commands(page) if (name := profile_of(words)) in ONE_HOST}
    _, *runs = planned(page, profile, tmp_path, capsys)
    for said in runs:
        assert re.search(r"^# +learner +\d[\d,]* +[\d.]+ GiB of", said, re.M), said
        failed = re.findall(r"^# fail: ([\w. ]+): (.*)", said, re.M)
        assert {name for name, _ in failed} <= ABSENT_HERE, said
        assert all("no NVIDIA GPU was found" in what for name, what in failed if name == "gpus"), said
    assert runs or page != EXAMPLE


@pytest.mark.parametrize("profile", ONE_HOST)
@pytest.mark.usefixtures("example_index")
def test_the_reproduction_is_planned_or_refused_on_each_profile(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init, *runs = planned(EXAMPLE, profile, tmp_path, capsys)
    if profile == "1x24gb":
        assert "21.7 GiB of 23.6 GiB usable" in init
    else:
        assert "learner " in init and runs and not any(re.search(r"needs \d+ GPUs|GiB needed", said) for said in runs)


@pytest.mark.usefixtures("example_index")
def test_the_plan_on_the_page_is_the_one_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = planned(EXAMPLE, "8xh100", tmp_path, capsys)[0]
    (shown,) = re.findall(r"```text\n(process .*?)```", (ROOT / EXAMPLE).read_text(), re.S)
    assert [line.rstrip() for line in shown.splitlines()] == [
        line.rstrip() for line in said.splitlines() if not line.startswith("wrote ")
    ]
