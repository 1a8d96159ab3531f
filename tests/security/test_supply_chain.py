"""The lock, the SBOM made from it, the constraints and pyproject.toml say the same."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from protocol.errors import UserError
from requirements.supply_chain import LOCK, ROOT, SBOM, Pin, foray_version, lock_text, read_lock, sbom

PLATFORM = {"python_version": "3.11", "platform_machine": "x86_64", "sys_platform": "linux", "extra": ""}


@pytest.fixture(scope="module")
def pins() -> dict[str, Pin]:
    return {pin.name: pin for pin in read_lock(LOCK.read_text())}


def _wanted() -> list[Requirement]:
    """What `.[cpu,dev]` asks for by itself, extras that name others opened."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, extras = [Requirement(text) for text in project["dependencies"]], ["cpu", "dev"]
    for extra in extras:  # grows while it is walked
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == "foray":
                extras += sorted(requirement.extras - set(extras))
            else:
                wanted.append(requirement)
    return [requirement for requirement in wanted if not requirement.marker or requirement.marker.evaluate(PLATFORM)]


def test_the_lock_holds_what_pyproject_asks_for(pins: dict[str, Pin]) -> None:
    wanted = _wanted()
    assert len(wanted) > 25
    for requirement in wanted:
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} is not in the lock: make lock"
        assert requirement.specifier.contains(pin.version, prereleases=True), f"{pin.name} {pin.version}: {requirement}"


def test_the_lock_holds_what_the_constraints_say(pins: dict[str, Pin]) -> None:
    lines = (ROOT / "deploy/constraints/cpu.txt").read_text().splitlines()
    given = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    known = {canonicalize_name(name): version for name, version in given.items()}
    differing = {
        name: (pins[name].version, version)
        for name, version in known.items()
        if name in pins and pins[name].version.partition("+")[0] != version
    }
    assert not differing and len(known.keys() & pins.keys()) > 80, "make lock"


def test_the_sbom_is_that_of_the_lock_byte_for_byte() -> None:
    made = json.dumps(sbom(read_lock(LOCK.read_text()), foray_version()), indent=1) + "\n"
    assert SBOM.read_text() == made, "make sbom"
    assert len(json.loads(made)["components"]) == len(read_lock(LOCK.read_text())) > 80


@pytest.mark.parametrize("path", [LOCK, SBOM], ids=["lock", "sbom"])
def test_neither_names_a_place_a_time_or_this_machine(path: Path) -> None:
    text = path.read_text()
    allowed = "http://cyclonedx.org/schema/bom-1.6.schema.json"
    assert set(re.findall(r"\w+://[^\s\"]+", text)) <= {allowed}
    assert not re.search(r"--(extra-)?index-url \S*/|--find-links|\b20\d\d-\d\d-\d\dT|serialNumber|file:", text)
    assert str(ROOT) not in text and len(text) < 100_000


def test_only_entries_with_a_version_and_a_hash_are_taken() -> None:
    good = "a==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n"
    assert read_lock("# said\n" + good) == [Pin("a", "1.0", ("0" * 64,))]
    for bad in ("a>=1.0\n", "a==1.0\n", "a==1.0 --hash=md5:00\n", "-e .\n", "a @ https://example.org/a.whl\n"):
        with pytest.raises(UserError, match="not pinned"):
            read_lock(good + bad)


def test_a_package_brings_the_hashes_of_this_platforms_files() -> None:
    def file(name: str, fill: str) -> dict[str, object]:
        return {"url": f"https://example.org/{name}", "hashes": {"sha256": fill * 64}}

    wheels = [
        file("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "a"),
        file("a-1-cp311-cp311-win32.whl", "b"),
    ]
    package = {"name": "a", "version": "1", "wheels": wheels, "sdist": file("a-1.tar.gz", "c")}
    ours = {"name": "foray", "directory": {"path": "."}}
    linux = frozenset({"cp311-cp311-manylinux2014_x86_64"})
    assert read_lock(lock_text({"packages": [package, ours]}, linux)) == [Pin("a", "1", ("a" * 64,))]
    assert read_lock(lock_text({"packages": [package]}, frozenset())) == [Pin("a", "1", ("c" * 64,))]
    with pytest.raises(UserError, match="no file"):
        lock_text({"packages": [{"name": "a", "version": "1"}]}, linux)
