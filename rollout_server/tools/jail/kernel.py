"""System calls that Python 3.11 has no function for, by ctypes. A call that fails raises OSError with its name."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 442, 444, 445, 446
"""Numbers from 424 on are the same on all machines."""


def machine() -> str:
    """`x86_64`, `aarch64`, ..."""
    return os.uname().machine


def call(name: str, *arguments: object) -> int:
    """A function of libc; integers are passed as long."""
    return _checked(name, getattr(_libc, name)(*map(_word, arguments)))


def syscall(name: str, number: int, *arguments: object) -> int:
    """A system call by its number; `name` is for the message."""
    return _checked(name, _libc.syscall(ctypes.c_long(number), *map(_word, arguments)))


def prctl(option: int, value: object, other: object = 0) -> None:
    call("prctl", option, value, other, 0, 0)


def drop_capabilities() -> None:
    """Gives up every capability for good, in whatever user namespace this is."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _word(argument: object) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(name: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return int(result)
