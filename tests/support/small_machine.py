"""A machine as small and old as this one can pretend to be."""

from __future__ import annotations

import os
import subprocess

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Environment that takes newer instructions, bfloat16 ones among them, from torch's products."""
SMALL_SHM = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]


def small_machine(command: list[str]) -> list[str]:
    """Return `command` on one core, with a /dev/shm of 64 MiB where this user may mount one."""
    core = min(os.sched_getaffinity(0))
    may = subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode == 0
    return [*(SMALL_SHM if may else ()), "taskset", "-c", str(core), *command]
