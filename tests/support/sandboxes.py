"""Whether this machine can run sandboxes, checked without the product: a broken sandbox must not skip its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000 | 0x20000000 | 0x20000) != 0)"
"""User, network, process and mount namespaces, as anybody may make them, or root."""


def require_bubblewrap() -> None:
    """Skip where bubblewrap is not installed or the kernel refuses namespaces; in CI both are failures."""
    reason = ""
    if shutil.which("bwrap") is None:
        reason = "bubblewrap is not installed"
    elif subprocess.run([sys.executable, "-I", "-S", "-c", UNSHARE], check=False).returncode:
        reason = "this kernel refuses namespaces to this user"
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
