"""The shell blocks of the first pages, run as they stand, in order, beside a finished run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foray.cli import main as foray
from foray.demo.warmstart import new_model, save_model
from tests.support.shell_blocks import run_shell, shell_blocks

ROOT = Path(__file__).parents[2]
SMALL = ("run.steps=2", "run.groups_per_step=2", "run.group_size=4", "learner.checkpoint_every=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of two steps in `kept/demo-0`.

    It was `runs/demo-0` when it ran: a command refuses a copy of a run directory that still exists.
    """
    folder = tmp_path_factory.mktemp("pages")
    save_model(new_model(0), folder / "model")
    run_dir = folder / "runs" / "demo-0"
    assert foray(["demo", "--prepare-only", "--dir", str(run_dir), "--model", str(folder / "model"), *SMALL]) == 0
    up = [sys.executable, "-m", "foray", "up", str(run_dir / "demo.yaml")]
    done = subprocess.run(up, cwd=folder, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "runs").rename(folder / "kept")
    return folder / "kept"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", ["README.md", "docs/quickstart.md", "docs/own-data.md", "docs/operate.md", "docs/extending.md"]
)
def test_the_blocks_of_a_page_run(finished: Path, tmp_path: Path, page: str) -> None:
    shutil.copytree(finished, tmp_path / "runs", symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
    blocks = [block for block in shell_blocks(ROOT / page) if not block.needs]
    assert blocks
    for block in blocks:
        run_shell(block.text, tmp_path, timeout_s=240)
