"""What a run is made of, by name, version and sha256: the hash-pinned lock, and the SBOM that is made from it.

    uv pip compile pyproject.toml ... --format pylock.toml -o FILE     (make lock)
    python -m requirements.supply_chain lock FILE > deploy/constraints/cpu.lock
    python -m requirements.supply_chain sbom > deploy/sbom/foray.cdx.json    (make sbom)

The lock is for the platform that `make test` runs on, Python 3.11 on Linux x86-64 without a GPU; it names files by
their hash and no place to get them from. The SBOM is CycloneDX 1.6, the same bytes for the same lock: no time, no
serial number, no path.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
LOCK, SBOM = ROOT / "deploy/constraints/cpu.lock", ROOT / "deploy/sbom/foray.cdx.json"
HEAD = """\
# Everything that `.[cpu,dev]` is made of, by hash: Python 3.11, Linux x86-64, no GPU. Made by `make lock`.
#   pip install --require-hashes -r deploy/constraints/cpu.lock && pip install --no-deps --no-build-isolation -e .
# torch+cpu is not on PyPI: give pip the index of CPU builds that PyTorch names (--extra-index-url).
"""
_PINNED = re.compile(r"([a-z0-9][a-z0-9-]*)==([A-Za-z0-9.+!-]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class Pin(NamedTuple):
    """One package of the lock: its name as the index writes it, version, and the sha256 of every file that will do."""

    name: str
    version: str
    hashes: tuple[str, ...]


def lock_text(pylock: Mapping[str, Any], tags: frozenset[str]) -> str:
    """The lock of a pylock.toml (PEP 751): of each package the wheels for one of `tags`, the source without any.

    Raises UserError for a package without a file that has a sha256.
    """
    lines = [HEAD]
    for package in sorted(pylock["packages"], key=lambda package: str(package["name"])):
        if "directory" in package:
            continue  # ourselves
        hashes = sorted(_hashes(package, tags))
        if not hashes:
            raise UserError(f"{package['name']} {package['version']} has no file for this platform with a sha256")
        pinned = " \\\n".join(f"    --hash=sha256:{one}" for one in hashes)
        lines.append(f"{package['name']}=={package['version']} \\\n{pinned}\n")
    return "".join(lines)


def _hashes(package: Mapping[str, Any], tags: frozenset[str]) -> Iterator[str]:
    wheels = [wheel for wheel in package.get("wheels", ()) if _tags(wheel) & tags]
    for file in wheels or [package.get("sdist", {})]:
        if "sha256" in file.get("hashes", {}):
            yield str(file["hashes"]["sha256"])


def _tags(wheel: Mapping[str, Any]) -> frozenset[str]:
    """`cp311-cp311-manylinux_2_28_x86_64` and all others that the file's name stands for."""
    name = str(wheel.get("name") or wheel["url"].rpartition("/")[2]).removesuffix(".whl")
    pythons, abis, platforms = (part.split(".") for part in name.split("-")[-3:])
    return frozenset(f"{a}-{b}-{c}" for a in pythons for b in abis for c in platforms)


def read_lock(text: str) -> list[Pin]:
    """The packages of a lock, in its order. Raises UserError for one that is not pinned by version and hash."""
    pins = []
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for entry in re.split(r"(?<!\\)\n", body):
        if not entry.strip():
            continue
        name, hashes = _PINNED.match(entry), tuple(_HASH.findall(entry))
        if name is None or not hashes:
            raise UserError(f"the lock has an entry that is not pinned: {entry.splitlines()[0]!r}", todo="make lock")
        pins.append(Pin(name[1], name[2], hashes))
    return pins


def sbom(pins: list[Pin], version: str) -> dict[str, Any]:
    """The CycloneDX 1.6 document of Foray `version` with these packages."""
    root = f"pkg:pypi/foray@{version}"
    components = [
        {
            "type": "library",
            "bom-ref": (url := f"pkg:pypi/{pin.name}@{pin.version.replace('+', '%2B')}"),
            "name": pin.name,
            "version": pin.version,
            "purl": url,
            "hashes": [{"alg": "SHA-256", "content": one} for one in pin.hashes],
        }
        for pin in pins
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": "foray",
                "version": version,
                "purl": root,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": [component["bom-ref"] for component in components]}],
    }


def foray_version() -> str:
    """What pyproject.toml calls this version."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def main(argv: list[str]) -> int:
    """See the module; the text goes to standard output."""
    match argv:
        case ["lock", path]:
            from packaging.tags import sys_tags

            with open(path, "rb") as file:
                print(lock_text(tomllib.load(file), frozenset(map(str, sys_tags()))), end="")
        case ["sbom"]:
            print(json.dumps(sbom(read_lock(LOCK.read_text()), foray_version()), indent=1))
        case _:
            raise UserError("what shall be made?", todo="python -m requirements.supply_chain lock PYLOCK, or sbom")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(error.render())
