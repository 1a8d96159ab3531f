"""Which files may be opened, by Landlock (Linux 5.13 and later): needs no right and holds for all descendants.

It does not govern what needs no opening: names, sizes and times of other files can be asked, and modes changed by their
owner; the latter is denied by seccomp.
"""

from __future__ import annotations

import ctypes
import os

from rollout_server.tools.jail import kernel

READ = (1 << 2) | (1 << 3)
"""READ_FILE and READ_DIR."""
WRITE = (1 << 1) | sum(1 << bit for bit in (4, 5, 7, 8, 12))
"""WRITE_FILE, REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_SYM."""
LATER = (1 << 13) | (1 << 14)
"""REFER (to move between directories) and TRUNCATE, which the first kernels with Landlock do not know."""
HANDLED = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""By version of the kernel's interface: how many kinds of access it can deny; all of them are, unless allowed."""
TCP, SCOPES = 0b11, 0b11
"""Bind and connect; abstract sockets and signals."""


def version() -> int:
    """Version of the kernel's Landlock; raises OSError without one."""
    return kernel.syscall("landlock_create_ruleset", kernel.LANDLOCK_CREATE_RULESET, None, 0, 1)


def restrict(readable: list[str], writable: str) -> None:
    """From now on this process opens files under `readable` for reading, and under `writable`; nothing is executed.

    `no_new_privs` must be set. Raises OSError.
    """
    number = version()
    handled = (1 << HANDLED.get(number, HANDLED[5])) - 1
    attributes = (ctypes.c_uint64 * 3)(handled, TCP if number >= 4 else 0, SCOPES if number >= 6 else 0)
    size = 24 if number >= 6 else 16 if number >= 4 else 8
    rules = kernel.syscall("landlock_create_ruleset", kernel.LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    try:
        for path in readable:
            _allow(rules, path, READ)
        _allow(rules, writable, READ | WRITE | (LATER & handled))
        kernel.syscall("landlock_restrict_self", kernel.LANDLOCK_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = access.to_bytes(8, "little") + directory.to_bytes(4, "little")
        kernel.syscall("landlock_add_rule", kernel.LANDLOCK_ADD_RULE, rules, 1, ctypes.c_char_p(rule), 0)
    finally:
        os.close(directory)
