"""Versions of Foray, Python and the packages that affect a run, from package metadata."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

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


def foray_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return version("foray")
    except PackageNotFoundError:
        return "(not installed)"


def versions() -> dict[str, str]:
    """Return name -> version, "" if a package is not installed."""
    found = {"foray": foray_version(), "python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found
