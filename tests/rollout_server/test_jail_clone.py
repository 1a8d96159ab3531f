"""`clone` in the jail: threads, but no processes and no namespaces, whatever else its flags say."""

from __future__ import annotations

import errno
import json
import textwrap

import pytest

from rollout_server.tools.sandbox import seccomp
from rollout_server.tools.sandbox.capabilities import missing
from rollout_server.tools.sandbox.linux import machine as this_machine
from rollout_server.tools.sandbox.runner import Limits, run_confined
from rollout_server.tools.sandbox.seccomp import CONDITIONAL
from tests.support.kernel import skip_or_fail

LIMITS = Limits(wall_s=10.0, cpu_s=5, memory_mb=256, file_mb=4, threads=8, output_bytes=4000)
THREAD = 0x10000
NAMESPACES = {
    **{"time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000},
    **{"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000},
}
PTHREAD = 0x3D0F00
"""What libc gives to `clone` for a thread."""


def verdict(machine: str, call: str, argument: int) -> int:
    """What the filter says to a call with this first argument."""
    column, architecture = seccomp.ARCHITECTURES[machine]
    low = argument & 0xFFFFFFFF
    words = {seccomp.NUMBER_AT: CONDITIONAL[call][column], seccomp.ARCHITECTURE_AT: architecture}
    words |= {seccomp.ARGUMENTS_AT: low, seccomp.ARGUMENTS_AT + 4: argument >> 32}
    program, at, loaded = seccomp.filter_for(machine, 7), 0, 0
    while True:
        code, true, false, operand = program[at]
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            loaded, jump = words[operand], 0
        else:
            jump = true if (loaded == operand if code == seccomp.EQUAL else loaded & operand) else false
        at += 1 + jump


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_a_thread_may_not_come_with_a_namespace(machine: str) -> None:
    refused = seccomp.REFUSE | errno.EPERM
    assert verdict(machine, "clone", PTHREAD) == seccomp.ALLOW
    assert verdict(machine, "clone", 17) == refused, "a process"
    for name, bit in NAMESPACES.items():
        assert verdict(machine, "clone", PTHREAD | bit) == refused, name


async def test_the_kernel_is_never_asked_for_it() -> None:
    """CLONE_THREAD without what it needs is EINVAL, and makes nothing; EPERM comes from the filter."""
    if missing(LIMITS, "seccomp"):
        skip_or_fail("seccomp", missing(LIMITS, "seccomp"))
    number = CONDITIONAL["clone"][seccomp.ARCHITECTURES[this_machine()][0]]
    source = f"""
        import ctypes, json
        libc = ctypes.CDLL(None, use_errno=True)
        def errno_of(flags):
            ctypes.set_errno(0)
            assert libc.syscall({number}, ctypes.c_ulong(flags), None, None, None, None) == -1
            return ctypes.get_errno()
        print(json.dumps([errno_of({THREAD} | bit) for bit in {[0, *NAMESPACES.values()]}]))
        """
    ran = await run_confined(textwrap.dedent(source), LIMITS, ("seccomp",))
    assert (ran.code, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout) == [errno.EINVAL, *[errno.EPERM] * len(NAMESPACES)]
