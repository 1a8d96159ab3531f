"""GPUs of this machine, and of the machines that hardware profiles are written for. torch is not imported."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = "libcuda.so.1"
GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One GPU. id: its value in CUDA_VISIBLE_DEVICES (an index or a UUID); memory in bytes."""

    id: str
    memory: int


@dataclass(frozen=True)
class Host:
    """One machine. `name` is empty for this one; `address`: where its processes are reached."""

    gpus: tuple[Gpu, ...]
    name: str = ""
    address: str = "127.0.0.1"


def _hosts(number: int, gpus: int, gib: float) -> tuple[Host, ...]:
    these = tuple(Gpu(str(index), int(gib * GIB)) for index in range(gpus))
    return tuple(Host(these, f"host-{index}" if number > 1 else "") for index in range(1, number + 1))


HARDWARE: dict[str, tuple[Host, ...]] = {
    "1x24gb": _hosts(1, 1, 23.6),
    "1xh200": _hosts(1, 1, 139.8),
    "4xa100-40": _hosts(1, 4, 39.4),
    "8xh100": _hosts(1, 8, 79.2),
    "2x8xh100": _hosts(2, 8, 79.2),
    "8x8xh100": _hosts(8, 8, 79.2),
}
"""Machines of the hardware profiles. Memory is what CUDA reports for such a GPU, slightly below its name."""

CPU = "cpu"
"""Name of the profile of a machine with two cores and no GPU."""


def this_machine(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows to this process, () without a driver or GPU.

    The driver applies CUDA_VISIBLE_DEVICES of this process's environment; `environ` gives the ids in it.
    """
    memory = list(_driver_memory())
    return visible(memory, environ.get(VISIBLE))


def visible(memory: list[int], given: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs with these bytes of memory, in CUDA's order.

    given  CUDA_VISIBLE_DEVICES, whose first entries are the ids of the GPUs; None if it is not set. CUDA ignores all
           entries from the first invalid one on, so there may be more entries than GPUs.
    """
    ids = [word.strip() for word in given.split(",")] if given is not None else [str(i) for i in range(len(memory))]
    return tuple(Gpu(name, size) for name, size in zip(ids, memory, strict=False) if name)


def _driver_memory() -> Iterator[int]:
    """Yield the bytes of memory of each visible GPU, in order."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return
    for index in range(count.value):
        device, size = ctypes.c_int(0), ctypes.c_size_t(0)
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
            return
        yield size.value


def gib(size: float) -> str:
    """Return bytes as text, e.g. `79.2 GiB`."""
    return f"{size / GIB:.1f} GiB"
