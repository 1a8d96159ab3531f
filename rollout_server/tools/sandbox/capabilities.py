"""Which ways to confine a program this machine has: each is tried out with a program, and then what they hold together.

A mechanism that is there may still not hold (an old Landlock, a container that hides it), so a last program attacks:
it tries to send something, to read and to write a file outside, and to reach this process. What it can do is not held,
and then the tool is not built.
"""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from socket import create_server

from protocol.errors import UserError
from rollout_server.tools.sandbox.runner import Limits, command
from rollout_server.tools.sandbox.spec import READY

log = logging.getLogger(__name__)

MECHANISMS = ("namespaces", "landlock", "seccomp")
HOLDS = {
    "network": {"namespaces", "seccomp"},
    "files": {"namespaces", "landlock"},
    "processes": {"namespaces", "seccomp"},
}
"""Each property with the mechanisms of which one is needed. Landlock refuses some of the network, and no processes."""
TRY_S = 20.0
"""Longest try, in seconds: a loaded machine is slow to start a process."""

_ATTACK = """
import os, socket
held = []
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port}))
except OSError:
    try:
        socket.create_connection(("127.0.0.1", {port}), 1)
    except OSError:
        held.append("network")
try:
    open({canary!r}).read()
except OSError:
    try:
        open({canary!r} + ".new", "w").close()
    except OSError:
        held.append("files")
try:
    os.kill({parent}, 0)
except OSError:
    held.append("processes")
print(*held)
"""


@lru_cache
def missing(limits: Limits, mechanism: str, libraries: tuple[str, ...] = ()) -> str:
    """Why a mechanism does not work on this machine, "" when it does. Tried once in a process."""
    return _try("pass", limits, (mechanism,), libraries)[1]


def require(limits: Limits, libraries: tuple[str, ...] = (), *, allow_unisolated: bool = False) -> tuple[str, ...]:
    """The mechanisms to confine programs with. The first time it takes some tenths of a second.

    Raises UserError when network, files or processes cannot be isolated here, unless `allow_unisolated`.
    """
    found = {name: missing(limits, name, libraries) for name in MECHANISMS}
    works = tuple(name for name, why in found.items() if not why)
    absent = "; ".join(f"{name}: {why}" for name, why in found.items() if why)
    held, failed = attack(limits, works, libraries)
    log.info(
        "programs of the policy are confined by %s%s",
        ", ".join(works) or "resource limits only",
        f" (not there: {absent})" if absent else "",
    )
    open_to = sorted(set(HOLDS) - held)
    if not open_to:
        return works
    if allow_unisolated and not failed:
        log.warning("rollout.episode.tools: programs of the policy are not kept from: %s", ", ".join(open_to))
        return works
    raise UserError(
        f"the tool python cannot isolate programs on this machine: {failed or ', '.join(open_to)}",
        why=absent or "the mechanisms are there but do not hold",
        todo="allow user namespaces, or Landlock (Linux 5.13) and seccomp, to this process; or leave the tool out. "
        "`allow_unisolated: true` runs programs with all that this server may do",
    )


@lru_cache
def attack(limits: Limits, mechanisms: tuple[str, ...], libraries: tuple[str, ...] = ()) -> tuple[frozenset[str], str]:
    """(what holds of network, files and processes under `mechanisms`, why nothing could be run)."""
    with tempfile.TemporaryDirectory(prefix="foray-canary-") as directory, create_server(("127.0.0.1", 0)) as near:
        canary = Path(directory) / "canary"
        canary.write_text("seen")
        source = _ATTACK.format(port=near.getsockname()[1], canary=str(canary), parent=os.getpid())
        said, failed = _try(source, limits, mechanisms, libraries)
    return frozenset(name for name in said.split() if HOLDS[name] & set(mechanisms)), failed


def _try(source: str, limits: Limits, mechanisms: Sequence[str], libraries: Sequence[str]) -> tuple[str, str]:
    """(what a program printed, why it could not be run)."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="foray-jail-", ignore_cleanup_errors=True) as directory:
        try:
            done = subprocess.run(
                command(replace(limits, wall_s=TRY_S), mechanisms, libraries, write_end),
                input=source.encode(),
                capture_output=True,
                pass_fds=(write_end,),
                cwd=directory,
                env={},
                start_new_session=True,
                timeout=TRY_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return "", str(error)[:300]
        finally:
            os.close(write_end)
            with os.fdopen(read_end, "rb") as report:
                said = report.read()
    if said != READY:
        return "", said.decode("utf-8", "replace") or done.stderr.decode("utf-8", "replace").strip()[
            -300:
        ] or f"ended with code {done.returncode}"
    return done.stdout.decode("utf-8", "replace"), ""
