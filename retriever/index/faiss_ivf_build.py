"""Training inverted lists on a seeded draw of passages, and building the index with bounded memory."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from protocol.errors import UserError
from retriever.config_index_faiss import FaissIvfPqSettings, FaissIvfSettings
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Source
from retriever.index.dense import Stored
from retriever.index.faiss_file import check_fits, check_survives, open_file, use_threads
from retriever.index.faiss_ivf_lists import write_filled

log = logging.getLogger(__name__)

IvfSettings = FaissIvfSettings | FaissIvfPqSettings

FILE = "index.faiss"
_OPQ_ROUNDS = 20
"""FAISS's 50 rounds cost 2.5 times as much; the error hardly falls after 20."""
KINDS = (faiss.IndexIVF, faiss.IndexPreTransform)


def auto_nlist(ntotal: int) -> int:
    """The power of two nearest to 4 * sqrt(ntotal), at most ntotal / 39 (below that k-means has too little a list)."""
    wanted = 1 << round(math.log2(4 * math.sqrt(ntotal)))
    return max(1, min(wanted, ntotal // 39))


def auto_parts(dim: int) -> int:
    """The largest divisor of `dim` that is at most dim / 8 (or 1)."""
    return next(parts for parts in range(max(1, dim // 8), 0, -1) if dim % parts == 0)


def exact_instead(settings: IvfSettings, ntotal: int) -> bool:
    """Whether a corpus is too small for lists: below `exact_below`, or with fewer passages than a code has values."""
    codes = 2**settings.pq_bits if isinstance(settings, FaissIvfPqSettings) else 1
    return ntotal < max(settings.exact_below, codes)


def build(settings: IvfSettings, source: Source, directory: Path) -> None:
    """Encode, train and fill, or look at the file that is there already."""
    if settings.file is not None:
        check_survives(settings.file)
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


def _parts(settings: IvfSettings) -> int:
    if not isinstance(settings, FaissIvfPqSettings):
        return 0
    dim = settings.encoder.build().dim
    parts = settings.pq_parts or auto_parts(dim)
    if dim % parts:
        raise UserError(
            f"pq_parts={parts} does not divide the encoder's {dim} dimensions", todo=f"set pq_parts={auto_parts(dim)}"
        )
    return parts


def train(settings: IvfSettings, vectors: Stored, parts: int) -> tuple[faiss.IndexIVF, faiss.LinearTransform | None]:
    """A trained, empty index, and the rotation to be done before it."""
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
        index.pq.cp.seed, index.pq.cp.min_points_per_centroid = settings.seed, 1
    elif vectors.dtype == np.float16:
        half = faiss.ScalarQuantizer.QT_fp16
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, nlist, half, faiss.METRIC_INNER_PRODUCT, False)
    else:
        index = faiss.IndexIVFFlat(quantizer, dim, nlist, faiss.METRIC_INNER_PRODUCT)
    quantizer.this.disown()  # the index frees it
    index.own_fields = True
    index.cp.seed, index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = settings.seed, 1, len(drawn)
    index.train(drawn)
    return index, rotation


def _rotation(settings: FaissIvfPqSettings, drawn: Vectors, parts: int) -> faiss.LinearTransform:
    dim = drawn.shape[1]
    quantizer = faiss.ProductQuantizer(dim, parts, settings.pq_bits)
    quantizer.cp.seed, quantizer.cp.min_points_per_centroid = settings.seed, 1
    rotation = faiss.OPQMatrix(dim, parts)
    rotation.pq, rotation.niter = quantizer, _OPQ_ROUNDS
    rotation.train(drawn)
    rotation.pq = None  # it is freed here and now
    return rotation


def _draw(settings: IvfSettings, vectors: Stored, nlist: int) -> Vectors:
    """float32 [n, dim]: distinct passages in the order of the corpus."""
    least = max(nlist, 64 * 2**settings.pq_bits if isinstance(settings, FaissIvfPqSettings) else 0)
    count = min(len(vectors), max(settings.train_size or 64 * nlist, least))
    rows = np.random.default_rng(settings.seed).choice(len(vectors), count, replace=False)
    return vectors[np.sort(rows)].astype(np.float32)
