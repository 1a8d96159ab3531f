"""Settings of the indexes. The unions below are the registry: a new index is one file and one line here.

Every member has a lazy `build` and `open`, so that neither faiss nor bm25s is imported unless chosen. What decides the
content of an index is its identity: the manifest of a built index holds it, and serving refuses an index that was
built with another.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from protocol.settings import Settings
from retriever.encoder.config import EncoderSettings, HashedEncoderSettings

if TYPE_CHECKING:
    from retriever.index.base import Index, Source
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import field_validator, model_validator

# What the settings of every index have in common: which of their fields decide what.


class IndexBase(Settings):
    """What every index's settings can do."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset()
    """Fields that decide how a built index is searched and not what it holds: changing one needs no new build."""
    PLACEMENT: ClassVar[frozenset[str]] = frozenset()
    """Fields that decide where and with how much work, and neither what the index holds nor which hits a query gets."""

    def identity(self) -> dict[str, Any]:
        """What decides the content of a built index, as JSON-compatible values."""
        content: dict[str, Any] = self.model_dump(mode="json", exclude=set(self.SEARCH_TIME | self.PLACEMENT))
        encoder = getattr(self, "encoder", None)
        return content if encoder is None else content | {"encoder": encoder.identity()}

    def search_time(self) -> dict[str, Any]:
        """Values of SEARCH_TIME: together with the identity they decide which hits a query gets."""
        return self.model_dump(mode="json", include=set(self.SEARCH_TIME))


class DenseBase(IndexBase):
    """An index over vectors."""

    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """What turns passages and queries into vectors."""
    dtype: Literal["float32", "float16"] = "float32"
    """How the vectors are stored. float16 halves the disk and the memory; scores change in the fourth digit."""


class FileBase(DenseBase):
    """An index over vectors that may come as a file which somebody else built."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file"})

    file: Path | None = None
    """A FAISS file to serve as it is, e.g. Search-R1's e5_Flat.index: one row a passage of the corpus, in its order,
    encoded by `encoder`. It stays where it is and is memory-mapped. None: vectors are built from the corpus."""

    def identity(self) -> dict[str, Any]:
        """With a file, the file is the content: settings of the build say nothing then. UserError if it is missing."""
        if self.file is None:
            return super().identity()
        from retriever.index.store import file_digest

        return {"type": self.model_dump()["type"], "encoder": self.encoder.identity(), "file": file_digest(self.file)}


class ApproximateBase(FileBase):
    """An index that may miss some of the best passages, for corpora too large to scan for every query."""

    exact_below: int = Field(default=10_000, ge=0)
    """Corpora of fewer passages get no approximate index: scanning them is as fast, and exact."""


# Settings of the FAISS indexes. FAISS is imported by `build` and `open`.


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
        from retriever.index.faiss_ivf import build

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
        from retriever.index.faiss_ivf import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote, memory-mapped; to be called, and searched, in the thread that will own it."""
        from retriever.index.dense import DenseIndex
        from retriever.index.faiss_ivf import open_ivf

        return DenseIndex(self.encoder.build(), open_ivf(self, directory, threads=threads))


__all__ = [
    "Bm25Settings",
    "FaissFlatSettings",
    "FaissGpuSettings",
    "FaissHnswSettings",
    "FaissIvfPqSettings",
    "FaissIvfSettings",
    "HybridSettings",
    "IndexBase",
    "IndexSettings",
    "MemberSettings",
    "MemorySettings",
]


class Bm25Settings(IndexBase):
    """Lexical ranking, Lucene's variant of BM25, memory-mapped. Needs no encoder.

    For the scores of pyserini and Anserini: k1=0.9 b=0.4 tokens=lucene stopwords=lucene stemming=porter.
    """

    type: Literal["bm25"] = "bm25"
    k1: float = Field(default=1.5, ge=0)
    """Saturation of the term frequency."""
    b: float = Field(default=0.75, ge=0, le=1)
    """Share of the length normalisation."""
    stopwords: Literal["none", "english", "lucene"] = "none"
    """Words that are ignored in passages and queries. `english` makes large indexes faster, recall is about equal;
    `lucene` are the 33 of Lucene's EnglishAnalyzer."""
    tokens: Literal["words", "lucene"] = "words"
    """What counts as a word. `words`: two or more letters, digits or underscores. `lucene`: as Lucene's EnglishAnalyzer
    cuts (Unicode annex 29, no possessive 's), and lengths rounded as Lucene keeps them."""
    stemming: Literal["none", "porter"] = "none"
    """`porter`: words are indexed and searched by their English stems (Porter 1980)."""

    def identity(self) -> dict[str, Any]:
        """Without `tokens` and `stemming` where they are the default: indexes from before them fit as they are."""
        added = {
            name for name in ("tokens", "stemming") if getattr(self, name) == type(self).model_fields[name].default
        }
        return {name: value for name, value in super().identity().items() if name not in added}

    def build(self, source: Source, directory: Path) -> None:
        """Index the texts of `source` into `directory`, which exists."""
        from retriever.index.bm25 import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote. `threads` is not used: scoring is single-threaded."""
        from retriever.index.bm25 import Bm25Index

        return Bm25Index(self, directory)


class MemorySettings(DenseBase):
    """Exact inner product by numpy: the oracle for the other dense indexes, and enough for small corpora."""

    type: Literal["memory"] = "memory"

    def build(self, source: Source, directory: Path) -> None:
        """Encode the texts of `source` and write the vectors into `directory`, which exists."""
        source.vectors(self.encoder, self.dtype, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote. `threads` is not used: numpy's BLAS takes OMP_NUM_THREADS."""
        from retriever.index.dense import DenseIndex
        from retriever.index.exact import MemoryVectors

        return DenseIndex(self.encoder.build(), MemoryVectors(directory))


Single = (
    Bm25Settings
    | FaissFlatSettings
    | FaissGpuSettings
    | FaissHnswSettings
    | FaissIvfSettings
    | FaissIvfPqSettings
    | MemorySettings
)

MemberSettings = Annotated[Single, Field(discriminator="type")]
"""What a hybrid may be made of."""


class HybridSettings(IndexBase):
    """Several indexes over one corpus, fused by reciprocal ranks (Cormack, Clarke, Buettcher 2009)."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"weights", "candidates"})

    type: Literal["hybrid"] = "hybrid"
    members: tuple[MemberSettings, ...] = Field(default=(Bm25Settings(), FaissFlatSettings()), min_length=1)
    """The indexes. Each is built into a subfolder of its own."""
    weights: tuple[float, ...] = ()
    """One a member, in their order: a hit of rank r there adds weight / (60 + r). Empty: all 1."""
    candidates: int = Field(default=100, ge=1)
    """Hits that every member contributes (raised to k where that is more)."""

    @field_validator("members", mode="before")
    @classmethod
    def _no_hybrid_inside(cls, members: Any) -> Any:
        for member in members if isinstance(members, list | tuple) else ():
            kind = member.get("type") if isinstance(member, dict) else getattr(member, "type", None)
            if kind == "hybrid":
                raise ValueError("a hybrid cannot be a member of a hybrid: list its members here instead")
        return members

    @model_validator(mode="after")
    def _one_weight_a_member(self) -> Self:
        if self.weights and len(self.weights) != len(self.members):
            raise ValueError(f"{len(self.weights)} weights for {len(self.members)} members")
        if any(weight <= 0 for weight in self.weights):
            raise ValueError("a weight must be above 0: leave the member out instead")
        return self

    def identity(self) -> dict[str, Any]:
        """The members' identities, in order."""
        return {"type": self.type, "members": [member.identity() for member in self.members]}

    def search_time(self) -> dict[str, Any]:
        """Its own and the members'."""
        return super().search_time() | {"members": [member.search_time() for member in self.members]}

    def build(self, source: Source, directory: Path) -> None:
        """Every member into its subfolder, one after the other."""
        from retriever.index.hybrid import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """All members, opened in this thread, which searches them one after the other."""
        from retriever.index.hybrid import HybridIndex

        return HybridIndex(self, directory, threads=threads)


IndexSettings = Annotated[Single | HybridSettings, Field(discriminator="type")]
"""Indexes: one file each, all behind `base.Index`."""
