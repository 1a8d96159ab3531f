"""Numbers of the system calls that a confined program may make: (x86_64, aarch64), None where there is no such call.

From the kernel's `asm/unistd_64.h` and `asm-generic/unistd.h`; `tests/rollout_server/test_jail.py` compares them where
those headers are installed.
"""

from __future__ import annotations

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
