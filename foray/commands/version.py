"""Print the versions of Foray, Python and the packages that affect a run."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version

from foray.cli import foray_version

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "aiohttp",
    "redis",
    "pydantic",
    "msgpack",
    "faiss-cpu",
    "bm25s",
    "sglang",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray version`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0. Reads package metadata only, without imports."""
    found = versions()
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<14} {value or '-'}")
    return 0


def versions() -> dict[str, str]:
    """Return name -> version, "" if a package is not installed."""
    found = {"foray": foray_version(), "python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found
