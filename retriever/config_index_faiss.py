"""Settings of the FAISS indexes. FAISS is imported by `build` and `open`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from retriever.config_index_base import ApproximateBase, FileBase

if TYPE_CHECKING:
    from retriever.index.base import Index, Source


class FaissFlatSettings(FileBase):
    """Exact inner product by FAISS on CPUs, straight from the memory-mapped vectors."""

    type: Literal["faiss_flat"] = "faiss_flat"

    def build(self, source: Source, directory: Path) -> None:
        """Encode the texts of `source` into `directory`, which exists; with `file`, only see that it fits."""
        from retriever.index.faiss_flat import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote; to be called, and searched, in the thread that will own it."""
        from retriever.index.dense import DenseIndex
        from retriever.index.faiss_flat import open_flat

        return DenseIndex(self.encoder.build(), open_flat(self, directory, threads=threads))


class FaissGpuSettings(FileBase):
    """Scans all vectors on GPUs, each of which holds its share. Needs a FAISS wheel with GPU support."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"precision", "spare"})
    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file", "devices", "temp_mb"})

    type: Literal["faiss_gpu"] = "faiss_gpu"
    devices: tuple[int, ...] = ()
    """CUDA ordinals of the GPUs that share the vectors, in this order. Empty: all that are visible."""
    temp_mb: float = Field(default=512.0, gt=0)
    """FAISS's scratch memory on each GPU, in MiB (its own default is up to 1.5 GiB)."""
    precision: Literal["float16", "float32"] = "float16"
    """What the GPUs hold and multiply. float16 halves their memory; hits are scored again from the stored vectors."""
    spare: int = Field(default=64, ge=0)
    """Candidates beyond k that the GPUs are asked for, since float16 (relative error 2**-11) may misplace the k-th."""

    def build(self, source: Source, directory: Path) -> None:
        """Encode the texts of `source` into `directory`, which exists; needs no GPU unless the encoder does."""
        from retriever.index.faiss_flat import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """Copies the vectors to the GPUs. UserError where there are none, or where they do not fit."""
        from retriever.index.dense import DenseIndex
        from retriever.index.faiss_gpu import open_gpu

        return DenseIndex(self.encoder.build(), open_gpu(self, directory))


class FaissHnswSettings(ApproximateBase):
    """A navigable graph (Malkov and Yashunin 2018, arXiv 1603.09320): the fastest on CPUs, all vectors in memory."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"ef_search"})
    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file", "build_threads"})

    type: Literal["faiss_hnsw"] = "faiss_hnsw"
    m: int = Field(default=32, ge=2, le=512)
    """Links a passage on every level but the lowest, which has twice as many: 8 * m bytes a passage."""
    ef_construction: int = Field(default=128, ge=1)
    """Length of the candidate list while building: longer is slower and better."""
    ef_search: int = Field(default=128, ge=1)
    """Length of the candidate list of a search (raised to k where that is more)."""
    build_threads: int = Field(default=0, ge=0)
    """Threads of the build; 0: OMP_NUM_THREADS, or one a core. Only 1 makes the same graph every time."""

    def build(self, source: Source, directory: Path) -> None:
        """Encode the texts of `source` and link them. Memory: all vectors and links."""
        from retriever.index.faiss_hnsw import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote, memory-mapped; to be called, and searched, in the thread that will own it."""
        from retriever.index.dense import DenseIndex
        from retriever.index.faiss_hnsw import open_hnsw

        return DenseIndex(self.encoder.build(), open_hnsw(self, directory, threads=threads))


class IvfBase(ApproximateBase):
    """Inverted lists round centroids: of `nlist` lists, the `nprobe` nearest to the query are scanned."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"nprobe"})
    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file", "devices", "temp_mb"})

    nlist: int = Field(default=0, ge=0)
    """Lists. 0: the power of two nearest to 4 * sqrt(passages), with 39 passages a list or more."""
    nprobe: int = Field(default=64, ge=1)
    """Lists scanned for a query."""
    train_size: int = Field(default=0, ge=0)
    """Passages that the centroids are trained on, drawn by `seed`. 0: 64 a list."""
    seed: int = 0
    """Seed of the draw and of k-means."""
    devices: tuple[int, ...] = ()
    """CUDA ordinals of the GPUs that share the lists. Empty: the CPU."""
    temp_mb: float = Field(default=512.0, gt=0)
    """FAISS's scratch memory on each GPU, in MiB."""


class FaissIvfSettings(IvfBase):
    """Inverted lists of whole vectors (IVF-Flat, Sivic and Zisserman 2003)."""

    type: Literal["faiss_ivf"] = "faiss_ivf"

    def build(self, source: Source, directory: Path) -> None:
        """Encode, train and fill the lists, on the CPU. Memory: the training sample and one block of vectors."""
        from retriever.index.faiss_ivf_build import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote, memory-mapped; to be called, and searched, in the thread that will own it."""
        from retriever.index.dense import DenseIndex
        from retriever.index.faiss_ivf import open_ivf

        return DenseIndex(self.encoder.build(), open_ivf(self, directory, threads=threads))


class FaissIvfPqSettings(IvfBase):
    """The same with product-quantised vectors (Jegou et al. 2011, doi 10.1109/TPAMI.2010.57): `pq_parts` bytes each.

    Rough scores come from the codes; the best candidates are scored again from the stored vectors.
    """

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"nprobe", "refine"})

    type: Literal["faiss_ivfpq"] = "faiss_ivfpq"
    pq_parts: int = Field(default=0, ge=0)
    """Parts that a vector is cut into, each one code; must divide the dimension. 0: the dimension over 8 or less."""
    pq_bits: int = Field(default=8, ge=4, le=12)
    """Bits a code."""
    opq: bool = False
    """Train a rotation first (Ge et al. 2013, OPQ): better codes, minutes more of training."""
    refine: int = Field(default=16, ge=1)
    """Candidates a hit that are scored again exactly; 1 only orders the k best codes anew."""

    def build(self, source: Source, directory: Path) -> None:
        """Encode, train and fill the lists, on the CPU. Memory: the training sample and one block of vectors."""
        from retriever.index.faiss_ivf_build import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote, memory-mapped; to be called, and searched, in the thread that will own it."""
        from retriever.index.dense import DenseIndex
        from retriever.index.faiss_ivf import open_ivf

        return DenseIndex(self.encoder.build(), open_ivf(self, directory, threads=threads))
