"""FAISS on GPUs: sharded flat indexes and sharded inverted lists.

The names used here exist only in FAISS's GPU wheel; `visible_devices` checks that first. A GPU index is not
thread-safe: like every index it belongs to the thread that opened it, and FAISS searches the devices in parallel. Each
device has one resource object with bounded scratch memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from protocol.errors import UserError
from retriever.encoder import build_encoder
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Rows, Scores
from retriever.index.config import TEMP_BYTES, FaissGpuSettings, IvfSettings
from retriever.index.dense import ApproximateVectors, DenseIndex, StoredVectors
from retriever.index.devices import ON_CPU, GpuShard, choose_devices, plan_shards
from retriever.index.faiss_flat import FaissFlatIndex, open_flat_file

NORM_BYTES = 4
"""FAISS stores a float32 norm with every vector."""
SPARE = 64
"""Extra candidates beyond k, because float16 (relative error 2**-11) may misplace the k-th."""
_PIECE_BYTES = 2 << 30
"""float16 vectors widened on the host at a time."""
_MAX_HITS = 2048
"""Maximum hits per FAISS search on a GPU."""
_Shards: Any = faiss.IndexShards


class FaissGpuIndex(DenseIndex):
    """An encoder with a sharded flat index on GPUs. Building needs no GPU unless the encoder does."""

    def __init__(self, settings: FaissGpuSettings, directory: Path, *, threads: int) -> None:
        """Copy the vectors to the GPUs. Raises UserError if there are no GPUs or the vectors do not fit."""
        super().__init__(build_encoder(settings.encoder), open_gpu(settings, directory))

    build = staticmethod(FaissFlatIndex.build)


def open_gpu(settings: FaissGpuSettings, directory: Path) -> ApproximateVectors:
    """Copy the vectors of `settings.file`, or the built ones, to the GPUs."""
    devices = visible_devices(settings.devices)
    vectors = store.open_vectors(directory) if settings.file is None else open_flat_file(settings.file)
    known = {device: free for device in devices if (free := free_bytes(device)) is not None}
    shards = plan_shards(
        *vectors.shape,
        row_bytes=vectors.shape[1] * (2 if settings.precision == "float16" else 4) + NORM_BYTES,
        devices=devices,
        temp_bytes=TEMP_BYTES,
        free_bytes=known,
    )
    flat = GpuFlat(settings, vectors, shards)
    return ApproximateVectors(flat.search, len(vectors), vectors, lambda k: max(k, min(k + SPARE, _MAX_HITS)))


class GpuFlat:
    """A tree of shards: devices are searched in parallel, the pieces on a device one after the other.

    A GpuIndexFlat is filled by a single `add`: FAISS reserves exactly that size and copies page by page, whereas a
    second `add` would need memory for old and new data at the same time. float32 vectors are read directly from the
    memory map, one piece per device.
    """

    def __init__(self, settings: FaissGpuSettings, vectors: StoredVectors, shards: Sequence[GpuShard]) -> None:
        dim = vectors.shape[1]
        self._kept: list[Any] = []  # FAISS's shards do not own their parts
        self._shards = _Shards(dim, True, True)  # threaded; ids continue from shard to shard
        for share in shards:
            memory = resources()
            pieces = _Shards(dim, False, True)
            self._kept += [memory, pieces]
            config = faiss.GpuIndexFlatConfig()
            config.device, config.useFloat16 = share.device, settings.precision == "float16"
            for block in _pieces(vectors, share):
                piece = faiss.GpuIndexFlatIP(memory, dim, config)
                _on_gpu(share.device, piece.add, block)
                pieces.add_shard(piece)
                self._kept.append(piece)
            self._shards.add_shard(pieces)

    def search(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        """Return best first, by products of float16 or float32 numbers."""
        scores, rows = self._shards.search(queries, count)
        return scores, rows


class GpuInvertedLists:
    """An inverted file with lists distributed over GPUs."""

    def __init__(self, index: Any, settings: IvfSettings) -> None:
        """`index` is the opened file; its lists are copied."""
        devices = visible_devices(settings.devices)
        self._kept = [resources() for _ in devices]
        options = faiss.GpuMultipleClonerOptions()
        options.shard = len(devices) > 1
        copy = faiss.index_cpu_to_gpu_multiple_py
        self._index = _on_gpu(devices[0], copy, self._kept, index, options, list(devices))
        nlist = faiss.extract_index_ivf(index).nlist
        faiss.GpuParameterSpace().set_index_parameter(self._index, "nprobe", min(settings.nprobe, nlist, _MAX_HITS))

    def search(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        """Return best first; NO_ROW if the lists have fewer."""
        scores, rows = self._index.search(queries, min(count, _MAX_HITS))
        return scores, rows


def visible_devices(requested: Sequence[int]) -> tuple[int, ...]:
    """Return the requested GPUs, or all. Raises UserError if this FAISS or this machine has none."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise UserError(
            "the installed FAISS does not support GPUs",
            why="it is the faiss-cpu wheel",
            todo=f"install faiss-gpu instead (extra `retriever-gpu`), use torch_flat, {ON_CPU}",
        )
    return choose_devices(requested, visible=faiss.get_num_gpus())


def free_bytes(device: int) -> int | None:
    """Return the free memory of a GPU, read from CUDA's driver library. None without the library."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), device):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle):
        return None
    failed = cuda.cuCtxPushCurrent_v2(context) or cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    cuda.cuDevicePrimaryCtxRelease_v2(handle)
    return None if failed else free.value


def resources() -> Any:
    """Return FAISS's resources for one device; its default scratch memory would be up to 1.5 GiB."""
    made = faiss.StandardGpuResources()
    made.setTempMemory(TEMP_BYTES)
    return made


def _pieces(vectors: StoredVectors, share: GpuShard) -> Any:
    if vectors.dtype == np.float32:
        yield vectors[share.start : share.stop]
        return
    for _, block in store.blocks(vectors, share.start, share.stop, _PIECE_BYTES):
        yield block


def _on_gpu(device: int, call: Any, *args: Any) -> Any:
    """Call FAISS on a GPU. Raises UserError: FAISS reports all GPU errors as RuntimeError."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise UserError(
            f"FAISS could not use GPU {device}",
            why=str(error).strip().rpartition("\n")[2][:300],
            todo="free its memory, or use other GPUs in index.devices",
        ) from None
