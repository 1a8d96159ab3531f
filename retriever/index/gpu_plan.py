"""Which rows of a flat index go to which GPU, and whether they fit. Pure: needs neither FAISS nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.errors import UserError

NORM_BYTES = 4
"""FAISS keeps a float32 norm beside every vector."""


class Share(NamedTuple):
    """Rows start .. stop-1 go to `device`, where they take `num_bytes` with FAISS's scratch memory."""

    device: int
    start: int
    stop: int
    num_bytes: int


def choose_devices(asked: Sequence[int], *, supported: bool, visible: int) -> tuple[int, ...]:
    """The CUDA ordinals to use: those asked for, or all. UserError, in words, where that cannot be."""
    on_cpu = "or take index.type=faiss_flat, or leave out index.devices, to search on the CPU"
    if not supported:
        raise UserError(
            "this FAISS cannot use GPUs",
            why="it is the faiss-cpu wheel",
            todo=f"install faiss-gpu-cu12 in its place (extra `retriever-gpu`), {on_cpu}",
        )
    if not visible:
        raise UserError(
            "no GPU is visible", why="CUDA finds none", todo=f"look at nvidia-smi and CUDA_VISIBLE_DEVICES, {on_cpu}"
        )
    devices = tuple(asked) or tuple(range(visible))
    if len(set(devices)) < len(devices):
        raise UserError(f"index.devices names a GPU twice: {list(devices)}")
    if wrong := [device for device in devices if not 0 <= device < visible]:
        raise UserError(
            f"there is no GPU {', '.join(map(str, wrong))}",
            why=f"{visible} visible, counted from 0",
            todo="mend index.devices",
        )
    return devices


def plan(
    ntotal: int,
    dim: int,
    *,
    itemsize: int,
    devices: Sequence[int],
    temp_bytes: int,
    free_bytes: Mapping[int, int],
) -> list[Share]:
    """Even, contiguous shares in the order of `devices`. UserError names every device whose share does not fit.

    Args:
        itemsize: bytes of a number on the GPU.
        free_bytes: what each device has left; devices that are not in it are not checked.
    """
    row_bytes = dim * itemsize + NORM_BYTES
    bounds = [ntotal * i // len(devices) for i in range(len(devices) + 1)]
    shares = [
        Share(device, start, stop, (stop - start) * row_bytes + temp_bytes)
        for device, start, stop in zip(devices, bounds, bounds[1:], strict=False)
    ]
    short = [share for share in shares if share.num_bytes > free_bytes.get(share.device, share.num_bytes)]
    if short:
        raise UserError(
            f"{ntotal:,} vectors of {dim} numbers do not fit on GPU {', '.join(str(share.device) for share in short)}",
            why="; ".join(
                f"GPU {share.device} needs {_gib(share.num_bytes)} and has {_gib(free_bytes[share.device])} free"
                for share in short
            ),
            todo="name more GPUs in index.devices, set index.precision=float16, free their memory, "
            "or take faiss_ivfpq, which needs a tenth",
        )
    return [share for share in shares if share.stop > share.start]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
