"""The lock, its bill of materials, the constraints and pyproject.toml agree."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK, SBOM = ROOT / "requirements/cpu.lock", ROOT / "requirements/foray.cdx.json"
PLATFORM = {"python_version": "3.11", "platform_machine": "x86_64", "sys_platform": "linux", "extra": ""}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPU_LOCKS = {
    "engine": ("engine",),
    "gpu": ("gpu", "redis-server", "dev"),
    "retriever-gpu": ("retriever-gpu", "encoder"),
}
"""Locks of machines with NVIDIA GPUs (`make gpu-lock`) and the extras in them."""
_ENTRY = re.compile(r"([a-z0-9][a-z0-9-]*)==([A-Za-z0-9.+!-]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


class Pin(NamedTuple):
    """One package of the lock, with the sha256 of every file that will do."""

    version: str
    hashes: frozenset[str]


def read_lock(path: Path) -> dict[str, Pin]:
    """Return the packages of a lock; a line that is neither a comment nor a package with version and sha256 fails."""
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))
    entries = list(_ENTRY.finditer(text))
    assert "".join(entry[0] for entry in entries) == text, f"{path.name} has an entry that is not pinned: make lock"
    return {entry[1]: Pin(entry[2], frozenset(re.findall("[0-9a-f]{64}", entry[3]))) for entry in entries}


@pytest.fixture(scope="module")
def pins() -> dict[str, Pin]:
    return read_lock(LOCK)


def _wanted(*extras: str, platform: dict[str, str] = PLATFORM) -> list[Requirement]:
    """Return the direct requirements of `.[extras]`, with extras that name others resolved."""
    wanted, queue = [Requirement(text) for text in PROJECT["dependencies"]], list(extras)
    for extra in queue:  # grows during the iteration
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if requirement.name == "foray":
                queue += sorted(requirement.extras - set(queue))
            else:
                wanted.append(requirement)
    return [requirement for requirement in wanted if not requirement.marker or requirement.marker.evaluate(platform)]


def _assert_pinned(pins: dict[str, Pin], wanted: list[Requirement]) -> None:
    for requirement in wanted:
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} is not in the lock: make lock"
        assert requirement.specifier.contains(pin.version, prereleases=True), f"{requirement}, locked: {pin.version}"


def test_the_lock_holds_what_pyproject_asks_for(pins: dict[str, Pin]) -> None:
    wanted = _wanted("cpu", "dev")
    assert len(wanted) > 25
    _assert_pinned(pins, wanted)


def test_the_lock_holds_what_the_constraints_say(pins: dict[str, Pin]) -> None:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    given = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    known = {canonicalize_name(name): version for name, version in given.items()}
    differing = {
        name: (pins[name].version, version)
        for name, version in known.items()
        if name in pins and pins[name].version.partition("+")[0] != version
    }
    assert not differing and len(known.keys() & pins.keys()) > 80, "make lock"


def test_the_sbom_is_that_of_the_lock(pins: dict[str, Pin]) -> None:
    bom = json.loads(SBOM.read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    application = bom["metadata"]["component"]
    assert (application["name"], application["version"]) == ("foray", PROJECT["version"])
    found = {
        part["name"]: Pin(
            part["version"],
            frozenset(one["content"] for file in part["externalReferences"] for one in file["hashes"]),
        )
        for part in bom["components"]
    }
    assert found == pins and len(bom["components"]) == len(pins) > 80, "make sbom"
    for part in bom["components"]:
        assert unquote(part["purl"]) == f"pkg:pypi/{part['name']}@{part['version']}"


@pytest.mark.parametrize(
    "path", [LOCK, SBOM, *(ROOT / f"requirements/{lock}.lock" for lock in GPU_LOCKS)], ids=lambda path: path.name
)
def test_neither_names_a_place_a_time_or_this_machine(path: Path) -> None:
    text = path.read_text()
    public = {
        "cyclonedx.org",
        "github.com",
        "pypi.org",
        *(f"cyclonedx-{x}.readthedocs.io" for x in ("bom-tool", "python-library")),
    }
    assert {urlsplit(url).hostname for url in re.findall(r"\w+://[^\s\"]+", text)} <= (
        public if path == SBOM else set()
    )
    assert not re.search(r"--(extra-)?index-url \S*/|--find-links|\b20\d\d-\d\d-\d\dT|serialNumber|file:", text)
    assert str(ROOT) not in text and len(text) < 500_000


@pytest.mark.parametrize("lock", GPU_LOCKS)
def test_a_lock_of_a_gpu_machine_holds_what_pyproject_asks_for(lock: str) -> None:
    pins = read_lock(ROOT / f"requirements/{lock}.lock")
    _assert_pinned(pins, _wanted(*GPU_LOCKS[lock], platform=PLATFORM | {"python_version": "3.12"}))


def test_learner_and_engine_share_torch_transformers_and_nccl() -> None:
    """NCCL refuses a group whose members have different versions, and weights go by files from then on."""
    engine, *others = (read_lock(ROOT / f"requirements/{lock}.lock") for lock in GPU_LOCKS)
    for pins in others:
        shared = engine.keys() & pins.keys()
        assert {"torch", "transformers", "tokenizers", "safetensors", "nvidia-nccl-cu13", "triton"} <= shared
        assert {name: pins[name] for name in shared} == {name: engine[name] for name in shared}


def test_the_tested_sglang_is_the_locked_one() -> None:
    version = read_lock(ROOT / "requirements/engine.lock")["sglang"].version
    assert f"SGLANG_VERSION := {version}\n" in (ROOT / "Makefile").read_text()
    assert f"sglang {version} " in (ROOT / "requirements/sglang_cpu.txt").read_text().splitlines()[0]
