"""Exact search with torch: float16 or float32 vectors on GPUs, each with its share, or on the CPU.

A scan by matrix products finds candidates. They are rescored in float64 from the stored vectors, as in all dense
indexes, so the hits are those of the reference. `foray bench retriever_gpu` measures the scan on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from retriever.encoder import build_encoder
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits, PassageSource, Rows, Scores
from retriever.index.config import TorchFlatSettings
from retriever.index.dense import DenseIndex, OverStoredVectors, StoredVectors, search_candidates, tolerance
from retriever.index.devices import GpuShard, choose_devices, plan_shards

_HALF_ERROR = 3 * 2.0**-11
"""Bound on the error of a product of vectors whose lengths multiply to at most 1: each of query, vector and result is
rounded to float16, with a relative error of at most 2**-11."""
SMALLEST_CHUNK = 4
"""Scores of a chunk below which `largest` sorts whole rows."""
_COPY_BYTES = 256 << 20
"""float32 vectors copied to a device at a time."""


class TorchFlatIndex(DenseIndex):
    """An encoder with a flat index in torch. Building needs no GPU unless the encoder does."""

    def __init__(self, settings: TorchFlatSettings, directory: Path, *, threads: int) -> None:
        """Copy the vectors to the devices. Raises UserError if a GPU does not exist or the vectors do not fit.

        `threads` is ignored: torch uses OMP_NUM_THREADS.
        """
        super().__init__(build_encoder(settings.encoder), TorchFlatVectors(settings, _open(settings, directory)))

    @staticmethod
    def build(settings: TorchFlatSettings, source: PassageSource, directory: Path) -> None:
        """Build the vectors from the corpus, or check the configured file."""
        if settings.file is None:
            source.vectors(settings.encoder, settings.dtype, directory)
            return
        from retriever.index.faiss_flat import FaissFlatIndex  # only such a file needs FAISS

        FaissFlatIndex.build(settings, source, directory)


class TorchFlatVectors(OverStoredVectors):
    """Vectors [ntotal, dim], distributed over devices by rows."""

    def __init__(self, settings: TorchFlatSettings, vectors: StoredVectors) -> None:
        super().__init__(vectors)
        self._spare = settings.spare
        ntotal, dim = vectors.shape
        self._dtype = torch.float16 if settings.precision == "float16" else torch.float32
        # twice the bound, because two scores are compared
        self._margin = tolerance(dim) if self._dtype == torch.float32 else 2 * _HALF_ERROR
        # the float16 accumulators that cuBLAS may use otherwise would exceed the bound
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        temp_bytes = int(settings.temp_mb * 2**20)
        self._scores_per_block = temp_bytes // 8  # the scores of a block, and what topk needs to sort them
        self._shards = [
            (share.start, _copy(vectors, share, self._dtype, device))
            for device, share in _place(settings.devices, ntotal, dim * self._dtype.itemsize, temp_bytes, dim)
        ]

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return search_candidates(self._rough, self._vectors, queries, k, self._spare, margin=self._margin)

    @torch.inference_mode()
    def _rough(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        """Return best first, by products in the precision of the devices."""
        if not len(queries):
            return np.empty((0, count), np.float32), np.empty((0, count), np.int64)
        # scaled by a power of two, so that float16 loses no small components
        scales = np.exp2(np.ceil(np.log2(np.maximum(np.abs(queries).max(axis=1, keepdims=True), 2.0**-100))))
        scaled = torch.from_numpy(np.ascontiguousarray(queries / scales, dtype=np.float32)).to(self._dtype)
        # all devices are started before the first result is waited for
        found = [(start, scan(vectors, scaled, count, self._scores_per_block)) for start, vectors in self._shards]
        scores = np.concatenate([best.float().cpu().numpy() for _, (best, _) in found], axis=1)
        rows = np.concatenate([at.cpu().numpy() + start for start, (_, at) in found], axis=1)
        order = np.lexsort((rows, -scores), axis=1)[:, :count]
        best = np.take_along_axis(scores, order, axis=1) * scales.astype(np.float32)
        return best, np.take_along_axis(rows, order, axis=1)


def _open(settings: TorchFlatSettings, directory: Path) -> StoredVectors:
    if settings.file is None:
        return store.open_vectors(directory)
    from retriever.index.faiss_flat import open_flat_file  # only such a file needs FAISS

    return open_flat_file(settings.file)


def _place(
    requested: Sequence[int], ntotal: int, row_bytes: int, temp_bytes: int, dim: int
) -> list[tuple[torch.device, GpuShard]]:
    """Return the devices with their rows: the requested GPUs, else all visible ones, else the CPU."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not requested and not visible:
        return [(torch.device("cpu"), GpuShard(-1, 0, ntotal, ntotal * row_bytes))]
    devices = choose_devices(requested, visible=visible)
    free = {device: torch.cuda.mem_get_info(device)[0] for device in devices}
    shards = plan_shards(ntotal, dim, row_bytes=row_bytes, devices=devices, temp_bytes=temp_bytes, free_bytes=free)
    return [(torch.device("cuda", share.device), share) for share in shards]


def _copy(vectors: StoredVectors, share: GpuShard, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return rows start .. stop-1 of `vectors` on `device`. Host memory holds a block at a time."""
    copied = torch.empty((share.stop - share.start, vectors.shape[1]), dtype=dtype, device=device)
    for first, block in store.blocks(vectors, share.start, share.stop, _COPY_BYTES):
        # to float16 on the host, which halves what is sent; a copy, because the memory map is read-only
        part = torch.from_numpy(block.astype(np.float16 if dtype == torch.float16 else np.float32))
        copied[first - share.start : first - share.start + len(block)] = part.to(device)
    return copied


def scan(vectors: torch.Tensor, queries: torch.Tensor, count: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and rows [n, c] of the largest products of queries [n, dim] with vectors [m, dim], c <= count.

    Not sorted over blocks. `most` bounds the number of scores in memory. The result may still be under way on a GPU.
    """
    queries = queries.to(vectors.device, non_blocking=True)
    step = max(1, most // len(queries))
    scores, rows = [], []
    for start in range(0, len(vectors), step):
        best, columns = largest(queries @ vectors[start : start + step].T, count)
        scores.append(best)
        rows.append(columns + start)
    merged = torch.cat(scores, dim=1)
    found = merged.topk(min(count, merged.shape[1]), dim=1)
    return found.values, torch.cat(rows, dim=1).gather(1, found.indices)


def largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and columns [n, c] of the largest of each row of `scores` [n, m], c = min(count, m), as topk does.

    The best `count` are in the `count` chunks with the largest maxima: the maxima are one pass over the scores, and
    topk sorts m / chunk + count * chunk values instead of m, the fewest with chunk = sqrt(m / count).
    """
    width = scores.shape[1]
    chunk = 1 << int(math.log2(max(1.0, width / count)) / 2)
    whole = width // chunk
    if chunk < SMALLEST_CHUNK or whole <= count:
        best = scores.topk(min(count, width), dim=1)
        return best.values, best.indices
    chunks = scores[:, : whole * chunk].view(-1, whole, chunk)
    kept = chunks.amax(dim=2).topk(count, dim=1).indices[:, :, None]
    columns = (kept * chunk + torch.arange(chunk, device=scores.device)).flatten(1)
    candidates = chunks.gather(1, kept.expand(-1, -1, chunk)).flatten(1)
    rest = torch.arange(whole * chunk, width, device=scores.device).expand(len(scores), -1)
    columns, candidates = torch.cat([columns, rest], 1), torch.cat([candidates, scores[:, whole * chunk :]], 1)
    best = candidates.topk(count, dim=1)
    return best.values, columns.gather(1, best.indices)
