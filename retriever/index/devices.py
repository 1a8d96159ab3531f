"""The GPUs of an index: which ones, and which rows each of them holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.errors import UserError

ON_CPU = "or search on the CPU: set index.type=faiss_flat, or remove index.devices"


class GpuShard(NamedTuple):
    """Rows start .. stop-1 go to `device`, where they take `num_bytes` including scratch memory."""

    device: int
    start: int
    stop: int
    num_bytes: int


def plan_shards(
    ntotal: int,
    dim: int,
    *,
    row_bytes: int,
    devices: Sequence[int],
    temp_bytes: int,
    free_bytes: Mapping[int, int],
) -> list[GpuShard]:
    """Return even, contiguous shards in the order of `devices`. Raises UserError naming devices whose share does not
    fit.

    Args:
        row_bytes: bytes of a row on the GPU.
        temp_bytes: scratch memory per GPU.
        free_bytes: free memory per device; devices not in it are not checked.
    """
    bounds = [ntotal * i // len(devices) for i in range(len(devices) + 1)]
    shards = [
        GpuShard(device, start, stop, (stop - start) * row_bytes + temp_bytes)
        for device, start, stop in zip(devices, bounds, bounds[1:], strict=False)
    ]
    short = [share for share in shards if share.num_bytes > free_bytes.get(share.device, share.num_bytes)]
    if short:
        raise UserError(
            f"{ntotal:,} vectors of {dim} numbers do not fit on GPU {', '.join(str(share.device) for share in short)}",
            why="; ".join(
                f"GPU {share.device} needs {_gib(share.num_bytes)} and has {_gib(free_bytes[share.device])} free"
                for share in short
            ),
            todo="add GPUs to index.devices, set index.precision=float16, free their memory, "
            "or use faiss_ivfpq, which needs a tenth",
        )
    return [share for share in shards if share.stop > share.start]


def choose_devices(requested: Sequence[int], *, visible: int) -> tuple[int, ...]:
    """Return the CUDA ordinals to use: the requested ones, or all. Raises UserError if that is not possible."""
    if not visible:
        raise UserError(
            "no GPU is visible", why="CUDA finds none", todo=f"check nvidia-smi and CUDA_VISIBLE_DEVICES, {ON_CPU}"
        )
    devices = tuple(requested) or tuple(range(visible))
    if len(set(devices)) < len(devices):
        raise UserError(f"index.devices names a GPU twice: {list(devices)}")
    if wrong := [device for device in devices if not 0 <= device < visible]:
        raise UserError(
            f"GPU {', '.join(map(str, wrong))} does not exist",
            why=f"{visible} visible, counted from 0",
            todo="correct index.devices",
        )
    return devices


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
