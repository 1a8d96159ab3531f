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

from rollout_server.tools.sandbox import linux as kernel

# Numbers of the system calls that a confined program may make: (x86_64, aarch64), None where there is no such call.
#
# From the kernel's `asm/unistd_64.h` and `asm-generic/unistd.h`; `tests/rollout_server/test_jail.py` compares them where
# those headers are installed.

ALLOWED: dict[str, tuple[int, int | None]] = {
    # files, within what the other mechanisms let it open
    **{"read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80)},
    **{"lstat": (6, None), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65)},
    **{"writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70), "access": (21, None), "dup": (32, 23)},
    **{"dup2": (33, None), "dup3": (292, 24), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83)},
    **{"truncate": (76, 45), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17), "chdir": (80, 49)},
    **{"fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None), "creat": (85, None)},
    **{"link": (86, None), "unlink": (87, None), "symlink": (88, None), "readlink": (89, None), "umask": (95, 166)},
    **{"statfs": (137, 43), "fstatfs": (138, 44), "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79)},
    **{"unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37), "symlinkat": (266, 36)},
    **{"readlinkat": (267, 78), "faccessat": (269, 48), "fallocate": (285, 47), "renameat2": (316, 276)},
    **{"copy_file_range": (326, 285), "statx": (332, 291), "faccessat2": (439, 439), "close_range": (436, 436)},
    **{"sendfile": (40, 71), "getdents64": (217, 61), "fadvise64": (221, 223)},
    # memory
    **{"mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216)},
    **{"msync": (26, 227), "madvise": (28, 233), "membarrier": (324, 283)},
    # its own signals, threads and end
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136)},
    **{"rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None)},
    **{"futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293)},
    **{"sched_yield": (24, 124), "sched_getaffinity": (204, 123), "restart_syscall": (219, 128), "exit": (60, 93)},
    **{"exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95)},
    # who and when
    **{"getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155)},
    **{"getsid": (124, 156), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177)},
    **{"getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "uname": (63, 160)},
    **{"getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153)},
    **{"gettimeofday": (96, 169), "time": (201, None), "clock_gettime": (228, 113), "clock_getres": (229, 114)},
    **{"clock_nanosleep": (230, 115), "nanosleep": (35, 101), "getitimer": (36, 102), "setitimer": (38, 103)},
    **{"alarm": (37, None), "getrandom": (318, 278)},
    # an event loop's: pipes, waiting, and (below) a pair of connected sockets
    **{"poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "pipe": (22, None)},
    **{"pipe2": (293, 59), "eventfd2": (290, 19), "epoll_create": (213, None), "epoll_create1": (291, 20)},
    **{"epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "recvfrom": (45, 207)},
    **{"shutdown": (48, 210), "getsockopt": (55, 209), "getsockname": (51, 204), "getpeername": (52, 205)},
}
"""With any arguments."""

CONDITIONAL: dict[str, tuple[int, int]] = {
    **{"clone": (56, 220), "clone3": (435, 435), "prlimit64": (302, 261), "tgkill": (234, 131), "kill": (62, 129)},
    **{"socketpair": (53, 199), "sendto": (44, 206), "ioctl": (16, 29), "fcntl": (72, 25)},
}
"""With some arguments, see `seccomp.filter_for`."""


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
