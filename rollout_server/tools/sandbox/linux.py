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


# Which files may be opened, by Landlock (Linux 5.13 and later): needs no right and holds for all descendants.
#
# It does not govern what needs no opening: names, sizes and times of other files can be asked, and modes changed by their
# owner; the latter is denied by seccomp.

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
    return syscall("landlock_create_ruleset", LANDLOCK_CREATE_RULESET, None, 0, 1)


def restrict(readable: list[str], writable: str) -> None:
    """From now on this process opens files under `readable` for reading, and under `writable`; nothing is executed.

    `no_new_privs` must be set. Raises OSError.
    """
    number = version()
    handled = (1 << HANDLED.get(number, HANDLED[5])) - 1
    attributes = (ctypes.c_uint64 * 3)(handled, TCP if number >= 4 else 0, SCOPES if number >= 6 else 0)
    size = 24 if number >= 6 else 16 if number >= 4 else 8
    rules = syscall("landlock_create_ruleset", LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    try:
        for path in readable:
            _allow(rules, path, READ)
        _allow(rules, writable, READ | WRITE | (LATER & handled))
        syscall("landlock_restrict_self", LANDLOCK_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = access.to_bytes(8, "little") + directory.to_bytes(4, "little")
        syscall("landlock_add_rule", LANDLOCK_ADD_RULE, rules, 1, ctypes.c_char_p(rule), 0)
    finally:
        os.close(directory)


# An own network, process tree, file tree and IPC, by Linux namespaces.
#
# As root they are made with root's rights, which are dropped afterwards; anybody else makes a user namespace first, where
# the machine allows that. The new root is memory: the libraries are bound into it read-only, `WORK` is the only place to
# write, and the old root is let go of, so that no path leads there.

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    *(0x20000, 0x02000000, 0x04000000, 0x08000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, AT_RECURSIVE = 1, 2, 4, 0x8000
MNT_DETACH = 2
WORK = "/program"


def enter(root: str, readable: list[str], work_mb: int) -> None:
    """Move this process into namespaces of its own; the next child is the first of the new process tree.

    root      an empty directory, mount point of the new root
    readable  directories that are there inside, under the same names
    Raises OSError when the machine does not allow it: the process must end then, it is half-way.
    """
    flags = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    uid, gid = os.getuid(), os.getgid()
    call("unshare", flags if uid == 0 else flags | NEWUSER)
    if uid != 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount("none", "/", "", REC | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for path in readable:
        _show(path, root)
    os.mkdir(root + WORK, 0o755)
    _mount("tmpfs", root + WORK, "tmpfs", NOSUID | NODEV | NOEXEC, f"size={work_mb}m,nr_inodes=4096,mode=1777")
    os.chdir(root)
    syscall("pivot_root", PIVOT_ROOT[machine()], b".", b".")
    call("umount2", b".", MNT_DETACH)
    _set_attributes("/", ATTR_RDONLY, recursive=False)
    os.chdir(WORK)


def _show(path: str, root: str) -> None:
    """`path` inside the new root: the same link, or the same directory, read-only."""
    inside = root + path
    if os.path.lexists(inside):
        return
    os.makedirs(os.path.dirname(inside), 0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), inside)
        return
    os.mkdir(inside, 0o755)
    _mount(path, inside, "", BIND | REC)
    _set_attributes(inside, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, recursive=True)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    try:
        call("mount", source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"{target}: {error.strerror}") from error


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    arguments = (-100, path.encode(), AT_RECURSIVE if recursive else 0, ctypes.byref(wanted), ctypes.sizeof(wanted))
    syscall("mount_setattr", MOUNT_SETATTR, *arguments)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
