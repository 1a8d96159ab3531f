"""An own network, process tree, file tree and IPC, by Linux namespaces.

As root they are made with root's rights, which are dropped afterwards; anybody else makes a user namespace first, where
the machine allows that. The new root is memory: the libraries are bound into it read-only, `WORK` is the only place to
write, and the old root is let go of, so that no path leads there.
"""

from __future__ import annotations

import ctypes
import os

from rollout_server.tools.jail import kernel

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
    kernel.call("unshare", flags if uid == 0 else flags | NEWUSER)
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
    kernel.syscall("pivot_root", kernel.PIVOT_ROOT[kernel.machine()], b".", b".")
    kernel.call("umount2", b".", MNT_DETACH)
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
        kernel.call("mount", source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"{target}: {error.strerror}") from error


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    arguments = (-100, path.encode(), AT_RECURSIVE if recursive else 0, ctypes.byref(wanted), ctypes.sizeof(wanted))
    kernel.syscall("mount_setattr", kernel.MOUNT_SETATTR, *arguments)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
