"""Check whether torch would find a CUDA device, without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
from pathlib import Path
from typing import Any

from deploy.hardware.inventory import DRIVER


def without_cuda() -> str:
    """Return why torch finds no CUDA device in this environment, "" if it should find one."""
    facts = _torch()
    if facts is None:
        return "torch is not installed"
    if facts.get("hip"):
        return ""  # ROCm looks like CUDA to torch; its driver is not checked
    if not facts.get("cuda"):
        return f"torch {facts.get('__version__')} is built without CUDA"
    return no_device()


def built_for_cuda() -> bool:
    """Return whether torch in this environment can use an NVIDIA GPU."""
    return bool((_torch() or {}).get("cuda"))


def cuda_of_torch() -> tuple[int, int]:
    """Return the CUDA version that torch in this environment is built for, (0, 0) without."""
    major, _, minor = str((_torch() or {}).get("cuda") or "0.0").partition(".")
    return int(major), int(minor)


def cuda_of_driver() -> tuple[int, int]:
    """Return the newest CUDA version that the NVIDIA driver supports, (0, 0) without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def _torch() -> dict[str, Any] | None:
    """Return the constants of torch/version.py, None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def no_device() -> str:
    """Return why the NVIDIA driver shows no device (CUDA_VISIBLE_DEVICES applies), "" if it shows one."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return "no NVIDIA driver is installed on this machine"
    count = ctypes.c_int(0)
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error:
        return f"the NVIDIA driver finds no usable device (error {error})"
    return "" if count.value else "the NVIDIA driver shows no device"
