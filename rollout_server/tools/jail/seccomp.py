"""Which system calls a confined program may make: a list of what is allowed, as a seccomp filter.

Whatever is not on the list fails with EPERM: making a socket or a process, running a file, tracing, mounting, changing
modes or owners, io_uring, keyrings and all that kernels may learn later. The filter is made in the process it binds,
since a process may signal itself only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from rollout_server.tools.jail import kernel
from rollout_server.tools.jail.syscalls import ALLOWED, CONDITIONAL

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and what the kernel calls the machine."""
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
CLONE_THREAD, AF_UNIX = 0x10000, 1
CLONE_NEW = 0x7E020080
"""Every CLONE_NEW* flag: a thread in a namespace that it makes."""
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what is asked of a pipe or a file."""
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
"""Duplicate, flags and locks. F_SETOWN and F_SETSIG would send signals to others."""

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""
_ALLOW: Instruction = (RETURN, 0, 0, ALLOW)


def refuse(error: int) -> Instruction:
    return (RETURN, 0, 0, REFUSE | error)


def install() -> None:
    """Bind this process and its threads. `no_new_privs` must be set. Raises OSError, also where the machine's system
    calls are not in the tables."""
    if kernel.machine() not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"seccomp: no table of system calls for {kernel.machine()}")
    raw = b"".join(struct.pack("HBBI", *one) for one in filter_for(kernel.machine(), os.getpid()))
    code = ctypes.create_string_buffer(raw, len(raw))
    program = struct.pack("HxxxxxxQ", len(raw) // 8, ctypes.addressof(code))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.c_char_p(program))


def filter_for(machine: str, pid: int) -> list[Instruction]:
    """The filter's instructions, for the process `pid`."""
    column, architecture = ARCHITECTURES[machine]
    out: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    for numbers in ALLOWED.values():
        number = numbers[column]
        if number is not None:
            out += [(EQUAL, 0, 1, number), _ALLOW]
    for name, block in _conditions(pid).items():
        out += [(EQUAL, 0, len(block), CONDITIONAL[name][column]), *block]
    return [*out, refuse(errno.EPERM)]


def _conditions(pid: int) -> dict[str, list[Instruction]]:
    """What each conditional call may be given. Every block ends in a return."""
    return {
        # threads only: no processes, no namespaces; a filter cannot see clone3's flags, without it libc takes clone
        "clone": [_low(0), (ANY_BIT, 2, 0, CLONE_NEW), (ANY_BIT, 0, 1, CLONE_THREAD), _ALLOW, refuse(errno.EPERM)],
        "clone3": [refuse(errno.ENOSYS)],
        "prlimit64": _only_null(2),
        "tgkill": _one_of(0, (pid,)),
        "kill": _one_of(0, (pid,)),
        "socketpair": _one_of(0, (AF_UNIX,)),
        # to the other end of a pair, not to an address
        "sendto": _only_null(4),
        "ioctl": _one_of(1, IOCTLS),
        "fcntl": _one_of(1, FCNTLS),
    }


def _low(argument: int) -> Instruction:
    return (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)


def _only_null(argument: int) -> list[Instruction]:
    """Allow when all 64 bits of the argument are 0."""
    high = (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument + 4)
    return [_low(argument), (EQUAL, 0, 3, 0), high, (EQUAL, 0, 1, 0), _ALLOW, refuse(errno.EPERM)]


def _one_of(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow when the argument, of which the kernel takes 32 bits, is one of `values`."""
    tests = [(EQUAL, len(values) - 1 - i, 0 if i + 1 < len(values) else 1, v) for i, v in enumerate(values)]
    return [_low(argument), *tests, _ALLOW, refuse(errno.EPERM)]
