"""The engineer's way through docs/install.md, block by block, on a machine without a GPU, a network or a checkout.

The files come from the first two blocks of docs/own-data.md. Left out are commands that install (`INSTALLS`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.pages.hardware import SHAPES
from tests.support.shell_blocks import run_shell, shell_blocks, shell_lines

ROOT = Path(__file__).parents[2]
INSTALLS = ("git clone", "make ", "python3 -m venv", "python3.12 -m venv", ". .venv", ".venv-retriever/bin/pip")
PLAN = "foray up big.yaml --dry-run"
OPINION = (PLAN, "foray status")
"""Commands whose exit code 1 is what they have to say: no GPU is here, and nothing is learned."""
NAMES = {"INDEX": "index", ".venv-retriever/bin/foray": "foray"}
"""What the page calls what a reader has, and what it is here."""


def commands() -> list[str]:
    lines = [line for line in shell_lines(ROOT / "docs" / "install.md") if not line.startswith(INSTALLS)]
    return [re.sub("|".join(map(re.escape, NAMES)), lambda found: NAMES[found[0]], line) for line in lines]


def test_make_has_every_target_that_the_page_calls() -> None:
    targets = {line.split()[1] for line in shell_lines(ROOT / "docs" / "install.md") if line.startswith("make ")}
    assert targets == {"setup", "gpu-env", "gpu-check"}
    assert not [name for name in targets if not re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.M)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_leads_from_doctor_over_a_plan_for_eight_gpus_to_a_run(tmp_path: Path) -> None:
    for block in shell_blocks(ROOT / "docs" / "own-data.md")[:2]:
        run_shell(block.text, tmp_path)
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR" / "config.json").write_text(json.dumps(SHAPES["Qwen2.5-7B"]))
    said: dict[str, str] = {}
    for command in commands():
        said[command] = run_shell(command, tmp_path, allowed=(0, 1) if command.startswith(OPINION) else (0,))
    verbs = [command.split()[1] for command in said]
    assert verbs == ["doctor", "index", "init", "up", "init", "doctor", "up", "status"]
    learner = re.search(r"^# +learner +(\S+) +([\d.]+) GiB of 79.2 GiB", said[PLAN], re.M)
    assert learner and len(learner[1].split(",")) == 4 and 40 < float(learner[2]) < 79.2, said[PLAN]
    failed = set(re.findall(r"^# fail: ([\w.]+)", said[PLAN], re.M))
    assert {"engine", "gpus"} <= failed <= {"engine", "gpus", "learner.publish", "run.model", "tokenizer"}
    steps = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert re.search(r"\bdone\b", said["foray status runs/small"])
