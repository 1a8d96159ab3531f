"""What is installed: our plain package names are ours, the wheel has the product alone, and `foray` its public API."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["protocol", "rollout_server", "learner", "retriever", "deploy", "foray"]
DATA = {
    "protocol/functions.lua",
    "protocol/runtime/removed_settings.yaml",
    "deploy/launch/slurm.sh",
    "foray/demo/demo.yaml",
    "foray/demo/algorithms.yaml",
    "foray/demo/hard.yaml",
    "foray/watch/templates/page.html",
    "foray/watch/templates/trajectory.html",
    *(p.relative_to(ROOT).as_posix() for p in (ROOT / "foray" / "dashboard" / "static").rglob("*") if p.is_file()),
    "foray/watch/templates/prometheus_rules.yml",
    *(path.relative_to(ROOT).as_posix() for path in (ROOT / "foray" / "presets").glob("*.yaml")),
}
HEAVY = ("torch", "transformers", "deepspeed", "faiss", "aiohttp", "redis", "tokenizers")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all files of the wheel, its own metadata left out."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out], cwd=ROOT, check=True)
    (built,) = out.glob("foray-*.whl")
    return {name for name in zipfile.ZipFile(built).namelist() if ".dist-info/" not in name}


def test_our_names_are_ours() -> None:
    """Another distribution that ships a `protocol` would win silently."""
    known = packages_distributions()
    for name in PACKAGES:
        module = import_module(name)
        assert module.__file__ and Path(module.__file__).resolve().is_relative_to(ROOT)
        assert set(known.get(name, ["foray"])) == {"foray"}, name


def test_a_tag_publishes_only_the_version_that_has_a_section_in_the_changelog() -> None:
    def release(tag: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, ROOT / ".github/release.py", tag], capture_output=True, text=True)

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    right, wrong = release(f"v{version}"), release("v0.0.1")
    assert right.returncode == 0 and "### Added" in right.stdout and "## [" not in right.stdout
    assert wrong.returncode == 1 and "v0.0.1" in wrong.stderr and version in wrong.stderr


def test_no_test_folder_is_a_package() -> None:
    # with tests/protocol/__init__.py the folder would become the package `protocol`
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_wheel_holds_the_product_alone(wheel: set[str]) -> None:
    assert {name.partition("/")[0] for name in wheel} == {*PACKAGES}
    words = {word for name in wheel for word in name.removesuffix(".py").replace("/", "_").split("_")}
    assert not words & {"test", "tests", "testing", "conftest", "fake", "fakes", "benchmarks"}
    assert not {name for name in wheel if "bench" in name or "demo/lm" in name}, "commands of a checkout"
    assert wheel >= DATA and wheel >= {f"{package}/py.typed" for package in PACKAGES}
    assert wheel >= {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}


def test_what_ships_imports_nothing_that_does_not() -> None:
    wrong, absent = [], ("tests", "benchmarks", "requirements")
    texts = {path: path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if any(name in text for name in absent) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.partition(".")[0] for name in names} & {*absent}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_the_public_api_is_there_and_light() -> None:
    code = (
        "import sys, foray\n"
        f"assert not set({HEAVY!r}) & set(sys.modules), set({HEAVY!r}) & set(sys.modules)\n"
        "assert foray.load_config(None).run == foray.RunSettings()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    foray = import_module("foray")
    assert all(getattr(foray, name) for name in foray.__all__) and {"LossOutput", "load_config"} <= set(dir(foray))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        foray.nothing_of_the_kind  # noqa: B018


def test_the_public_api_only_re_exports() -> None:
    body = ast.parse((ROOT / "foray" / "__init__.py").read_text()).body
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert defined == ["__getattr__", "__dir__"]
