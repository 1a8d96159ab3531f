"""What the kernel offers for isolating programs, asked without the product: a sandbox that is broken must not skip."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache

import pytest

LANDLOCK_CREATE_RULESET, RULESET_VERSION = 444, 1
"""The system call's number is the same on every architecture; with this flag it returns the version it speaks."""
UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000 | 0x20000000 | 0x20000) != 0)"
"""User, network, process and mount namespaces, as anybody may make them, or root."""


@cache
def offers(mechanism: str) -> bool:
    """Whether this kernel offers `namespaces`, `landlock` or `seccomp` to this user."""
    match mechanism:
        case "namespaces":
            return not subprocess.run([sys.executable, "-I", "-S", "-c", UNSHARE], check=False).returncode
        case "landlock":
            return int(ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, RULESET_VERSION)) > 0
        case "seccomp":
            with open("/proc/sys/kernel/seccomp/actions_avail", encoding="ascii") as actions:
                return "errno" in actions.read()
    raise ValueError(mechanism)


def skip_or_fail(mechanism: str, complaint: str) -> None:
    """The product found that `mechanism` is missing: skip where the kernel says so too, fail where it does not."""
    if offers(mechanism):
        pytest.fail(f"this kernel has {mechanism}, and the sandbox does not work with it: {complaint}")
    pytest.skip(f"this machine has no {mechanism}: {complaint}")
