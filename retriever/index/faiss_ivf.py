"""Inverted lists: trained on a sample of passages, built in bounded memory, searched on CPUs through a memory map or on
GPUs that share the lists.

The lists to scan are selected exactly here, not by FAISS, whose float32 products differ in the last bits with the
batch: otherwise a query's hits could depend on its batch.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from retriever.encoder import build_encoder
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits, PassageSource, Rows, Scores, VectorIndex
from retriever.index.config import FaissIvfPqSettings, IvfSettings
from retriever.index.dense import ApproximateVectors, DenseIndex, QueryRescaler, StoredVectors
from retriever.index.faiss_flat import FaissFlatVectors, check_fits, check_readable, open_file, use_threads
from retriever.index.faiss_gpu import GpuInvertedLists

log = logging.getLogger(__name__)
SEED = 0
"""Seed of the passages that the centroids are trained on, and of k-means."""
FILE = "index.faiss"
KINDS = (faiss.IndexIVF, faiss.IndexPreTransform)
SPARE = 8
"""Extra candidates beyond k for rescoring full vectors: float32 sums may swap neighbours."""
_OPQ_ROUNDS = 20
"""k-means rounds. FAISS's 50 take 2.5 times as long; the error hardly decreases after 20."""
_BLOCK_BYTES = 512 << 20


class FaissIvfIndex(DenseIndex):
    """An encoder with inverted lists of full or product-quantised vectors."""

    def __init__(self, settings: IvfSettings, directory: Path, *, threads: int) -> None:
        super().__init__(build_encoder(settings.encoder), open_ivf(settings, directory, threads=threads))

    @staticmethod
    def build(settings: IvfSettings, source: PassageSource, directory: Path) -> None:
        """Encode, train and fill, or check the configured file."""
        if settings.file is not None:
            check_readable(settings.file)
            found = open_file(settings.file, KINDS, "an inverted file (IVF)")
            check_fits(settings.file, (found.ntotal, found.d), settings, source)
            return
        parts = _parts(settings)  # before hours of encoding
        source.vectors(settings.encoder, settings.dtype, directory)
        vectors = store.open_vectors(directory)
        if exact_instead(settings, len(vectors)):
            return
        use_threads(0)
        index, rotation = train(settings, vectors, parts)
        write_filled(index, rotation, vectors, directory / FILE)


def open_ivf(settings: IvfSettings, directory: Path, *, threads: int) -> VectorIndex:
    """Open the configured file, whose scores are used directly, or the output of `build`."""
    path = settings.file or directory / FILE
    if settings.file is None and not path.exists():
        return FaissFlatVectors(store.open_vectors(directory), threads=threads)
    use_threads(threads)
    index = open_file(path, KINDS, "an inverted file (IVF)")
    vectors = store.open_vectors(directory) if settings.file is None else None
    rough: Callable[[Vectors, int], tuple[Scores, Rows]]
    if settings.devices:
        rough = GpuInvertedLists(index, settings).search
    else:
        rough = InvertedLists(index, settings.nprobe, threads=threads).search
    return ApproximateVectors(rough, index.ntotal, vectors, _candidates(settings))


def _candidates(settings: IvfSettings) -> Callable[[int], int]:
    refine = settings.refine if isinstance(settings, FaissIvfPqSettings) else 1
    return lambda k: max(k + SPARE, k * refine)


class InvertedLists:
    """An IndexIVF, or one behind a rotation."""

    def __init__(self, index: Any, nprobe: int, *, threads: int) -> None:
        self._whole = index  # owns the objects below
        self._before: list[Any] = []
        self._ivf: Any = faiss.extract_index_ivf(index)
        if isinstance(index, faiss.IndexPreTransform):
            chain: Any = index.chain
            self._before = [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())]
        self._ivf.nprobe = self._nprobe = min(nprobe, self._ivf.nlist)
        quantizer = faiss.downcast_index(self._ivf.quantizer)
        self._quantizer = quantizer
        self._centroids: VectorIndex | None = None
        if isinstance(quantizer, faiss.IndexFlat):
            matrix = quantizer.reconstruct_n(0, self._ivf.nlist)
            self._centroids = QueryRescaler(FaissFlatVectors(matrix, threads=threads))

    def search(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        """Return the best `count` passages in the nearest lists."""
        rotated = self._rotated(queries)
        nearest = self._nearest(rotated)
        scores, rows = self._ivf.search_preassigned(rotated, count, nearest.rows, nearest.scores)
        return scores, rows

    def _rotated(self, queries: Vectors) -> Vectors:
        if not self._before:
            return queries
        # one at a time: FAISS's batch product differs in the last bits with the batch size
        rotated = []
        for i in range(len(queries)):
            query = queries[i : i + 1]
            for transform in self._before:
                query = transform.apply(query)
            rotated.append(query)
        return np.concatenate(rotated)

    def _nearest(self, queries: Vectors) -> Hits:
        if self._centroids is not None:
            return self._centroids.search(queries, self._nprobe)
        scores, rows = self._quantizer.search(queries, self._nprobe)
        return Hits(rows, scores)


def train(
    settings: IvfSettings, vectors: StoredVectors, parts: int
) -> tuple[faiss.IndexIVF, faiss.LinearTransform | None]:
    """Return a trained, empty index, and the rotation applied before it."""
    ntotal, dim = vectors.shape
    nlist = min(settings.nlist or auto_nlist(ntotal), ntotal)
    drawn = _draw(settings, vectors, nlist)
    log.info("training %d lists on %d of %d passages", nlist, len(drawn), ntotal)
    quantizer: Any = faiss.IndexFlatIP(dim)
    rotation = None
    index: faiss.IndexIVF
    if isinstance(settings, FaissIvfPqSettings):
        if settings.opq:
            rotation = _rotation(settings, drawn, parts)
            drawn = rotation.apply(drawn)
        index = faiss.IndexIVFPQ(quantizer, dim, nlist, parts, settings.pq_bits, faiss.METRIC_INNER_PRODUCT)
        index.pq.cp.seed, index.pq.cp.min_points_per_centroid = SEED, 1
    elif vectors.dtype == np.float16:
        half = faiss.ScalarQuantizer.QT_fp16
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, nlist, half, faiss.METRIC_INNER_PRODUCT, False)
    else:
        index = faiss.IndexIVFFlat(quantizer, dim, nlist, faiss.METRIC_INNER_PRODUCT)
    quantizer.this.disown()  # the index frees it
    index.own_fields = True
    index.cp.seed, index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = SEED, 1, len(drawn)
    index.train(drawn)
    return index, rotation


def _rotation(settings: FaissIvfPqSettings, drawn: Vectors, parts: int) -> faiss.LinearTransform:
    dim = drawn.shape[1]
    quantizer = faiss.ProductQuantizer(dim, parts, settings.pq_bits)
    quantizer.cp.seed, quantizer.cp.min_points_per_centroid = SEED, 1
    rotation = faiss.OPQMatrix(dim, parts)
    rotation.pq, rotation.niter = quantizer, _OPQ_ROUNDS
    rotation.train(drawn)
    rotation.pq = None  # freed immediately
    return rotation


def _draw(settings: IvfSettings, vectors: StoredVectors, nlist: int) -> Vectors:
    """Return float32 [n, dim]: distinct passages in the order of the corpus."""
    least = max(nlist, 64 * 2**settings.pq_bits if isinstance(settings, FaissIvfPqSettings) else 0)
    count = min(len(vectors), max(64 * nlist, least))
    rows = np.random.default_rng(SEED).choice(len(vectors), count, replace=False)
    return vectors[np.sort(rows)].astype(np.float32)


def _parts(settings: IvfSettings) -> int:
    if not isinstance(settings, FaissIvfPqSettings):
        return 0
    dim = build_encoder(settings.encoder).dim
    parts = settings.pq_parts or auto_parts(dim)
    if dim % parts:
        raise UserError(
            f"pq_parts={parts} does not divide the encoder's {dim} dimensions", todo=f"set pq_parts={auto_parts(dim)}"
        )
    return parts


def auto_nlist(ntotal: int) -> int:
    """Return the power of two nearest to 4 * sqrt(ntotal), at most ntotal / 39 (what k-means needs a list)."""
    wanted = 1 << round(math.log2(4 * math.sqrt(ntotal)))
    return max(1, min(wanted, ntotal // 39))


def auto_parts(dim: int) -> int:
    """Return the largest divisor of `dim` that is at most dim / 8 (or 1)."""
    return next(parts for parts in range(max(1, dim // 8), 0, -1) if dim % parts == 0)


def exact_instead(settings: IvfSettings, ntotal: int) -> bool:
    """Return whether a corpus is too small for lists: below `exact_below`, or below the number of codes."""
    codes = 2**settings.pq_bits if isinstance(settings, FaissIvfPqSettings) else 1
    return ntotal < max(settings.exact_below, codes)


def write_filled(
    index: faiss.IndexIVF, rotation: faiss.LinearTransform | None, vectors: StoredVectors, path: Path
) -> None:
    """Write the trained, empty `index` to `path`, filled with `vectors`, each rotated by `rotation`.

    Two passes over the vectors: one finds the lists, the other writes. Memory: one block and 12 bytes a passage.

    FAISS can hold all lists in memory, or keep them in a second file whose path it stores. Here FAISS writes the
    trained, empty index, and its empty lists are replaced by full ones in FAISS's own format (`write_InvertedLists` in
    faiss/impl/index_write.cpp): "ilar", number of lists, bytes a code, "full", the sizes as a vector, then every list's
    codes and int64 ids. `faiss.read_index` reads and maps it.
    """
    lists = np.empty(len(vectors), dtype=np.int64)
    for first, block in _rotated(vectors, rotation):
        lists[first : first + len(block)] = index.quantizer.search(block, 1)[1][:, 0]
        log.info("%d of %d passages have a list", first + len(block), len(vectors))
    sizes = np.bincount(lists, minlength=index.nlist)
    starts = _write_empty(index, rotation, sizes, path)
    file = np.memmap(path, dtype=np.uint8, mode="r+")
    filled = np.zeros(index.nlist, dtype=np.int64)
    for first, block in _rotated(vectors, rotation):
        chosen = lists[first : first + len(block)]
        codes = np.empty((len(block), index.code_size), dtype=np.uint8)
        index.encode_vectors(len(block), faiss.swig_ptr(block), faiss.swig_ptr(chosen), faiss.swig_ptr(codes), False)
        order = np.argsort(chosen, kind="stable")
        ids = (order + first).astype("<i8").view(np.uint8).reshape(-1, 8)
        found, places, counts = np.unique(chosen[order], return_index=True, return_counts=True)
        for number, place, count in zip(found.tolist(), places.tolist(), counts.tolist(), strict=True):
            part, before = slice(place, place + count), int(filled[number])
            _write_at(file, starts[number] + before * index.code_size, codes[order[part]])
            _write_at(file, starts[number] + sizes[number] * index.code_size + before * 8, ids[part])
            filled[number] += count
        log.info("%d of %d passages are in their lists", first + len(block), len(vectors))
    file.flush()


def _rotated(vectors: StoredVectors, rotation: faiss.LinearTransform | None) -> Any:
    for first, block in store.blocks(vectors, block_bytes=_BLOCK_BYTES):
        yield first, block if rotation is None else rotation.apply(block)


def _write_empty(
    index: faiss.IndexIVF, rotation: faiss.LinearTransform | None, sizes: npt.NDArray[np.int64], path: Path
) -> npt.NDArray[np.int64]:
    """Write all but the lists, extend the file for them, and return the start of each."""
    index.ntotal = int(sizes.sum())
    whole: npt.NDArray[np.uint8] = faiss.serialize_index(
        index if rotation is None else faiss.IndexPreTransform(rotation, index)
    )
    nothing = struct.pack("<4sQQ4sQ", b"ilar", index.nlist, index.code_size, b"sprs", 0)
    head = whole.tobytes()
    if not head.endswith(nothing):
        raise RuntimeError(f"FAISS {faiss.__version__} writes empty inverted lists in an unknown format")
    lengths = sizes.astype("<u8").tobytes()
    head = head.removesuffix(nothing)
    head += struct.pack("<4sQQ4sQ", b"ilar", index.nlist, index.code_size, b"full", index.nlist) + lengths
    bytes_of = sizes * (index.code_size + 8)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + int(bytes_of.sum()))
    starts: npt.NDArray[np.int64] = len(head) + np.concatenate([[0], np.cumsum(bytes_of)[:-1]])
    return starts


def _write_at(file: Any, start: int, content: npt.NDArray[np.uint8]) -> None:
    file[start : start + content.size] = content.reshape(-1)
