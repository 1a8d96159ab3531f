"""Check whether torch would find a CUDA device, without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
from pathlib import Path

DRIVER = "libcuda.so.1"


def without_cuda() -> str:
    """Return why torch finds no CUDA device in this environment, "" if it should find one."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if facts.get("hip"):
        return ""  # ROCm looks like CUDA to torch; its driver is not checked
    if not facts.get("cuda"):
        return f"torch {facts.get('__version__')} is built without CUDA"
    return _no_device()


def _no_device() -> str:
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
