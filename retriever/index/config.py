"""Settings of the indexes: fields only. `retriever.index.config.REGISTRY` maps each class to its implementation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from protocol.settings import Settings, union_of
from retriever.encoder.config import EncoderSettings, HashedEncoderSettings


class IndexBase(Settings):
    """Base of the indexes' settings: which of their fields decide what."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset()
    """Fields that decide how a built index is searched and not what it holds: changing one needs no new build."""
    PLACEMENT: ClassVar[frozenset[str]] = frozenset()
    """Fields that decide where and with how much work, and neither what the index holds nor which hits a query gets."""
    ADDED: ClassVar[frozenset[str]] = frozenset()
    """Fields that are newer than the index format: their defaults are not part of the identity, so that indexes built
    before them still fit."""

    type: str


class DenseBase(IndexBase):
    """An index over vectors."""

    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """What turns passages and queries into vectors."""
    dtype: Literal["float32", "float16"] = "float32"
    """How the vectors are stored. float16 halves the disk and the memory; scores change in the fourth digit."""


class FileBase(DenseBase):
    """An index over vectors that may come as a file built elsewhere."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file"})

    file: Path | None = None
    """A FAISS file to serve as it is, e.g. Search-R1's e5_Flat.index: one row a passage of the corpus, in its order,
    encoded by `encoder`. It is memory-mapped in place. None: vectors are built from the corpus."""


class ApproximateBase(FileBase):
    """An index that may miss some of the best passages, for corpora too large to scan for every query."""

    exact_below: int = Field(default=10_000, ge=0)
    """Corpora of fewer passages get no approximate index: scanning them is as fast, and exact."""


class FaissFlatSettings(FileBase):
    """Exact inner product by FAISS on CPUs, straight from the memory-mapped vectors."""

    type: Literal["faiss_flat"] = "faiss_flat"


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
    """Candidates a hit that are scored again exactly; 1 only reorders the k best codes."""


class Bm25Settings(IndexBase):
    """Lexical ranking, Lucene's variant of BM25, memory-mapped. Needs no encoder.

    For the scores of pyserini and Anserini: k1=0.9 b=0.4 tokens=lucene stopwords=lucene stemming=porter.
    """

    ADDED: ClassVar[frozenset[str]] = frozenset({"tokens", "stemming"})

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


class MemoryIndexSettings(DenseBase):
    """Exact inner product by numpy: the oracle for the other dense indexes, and enough for small corpora."""

    type: Literal["memory"] = "memory"


IvfSettings = FaissIvfSettings | FaissIvfPqSettings


REGISTRY: dict[type[IndexBase], str] = {
    Bm25Settings: "retriever.index.bm25:Bm25Index",
    FaissFlatSettings: "retriever.index.faiss_flat:FaissFlatIndex",
    FaissGpuSettings: "retriever.index.faiss_gpu:FaissGpuIndex",
    FaissHnswSettings: "retriever.index.faiss_hnsw:FaissHnswIndex",
    FaissIvfSettings: "retriever.index.faiss_ivf:FaissIvfIndex",
    FaissIvfPqSettings: "retriever.index.faiss_ivf:FaissIvfIndex",
    MemoryIndexSettings: "retriever.index.exact:ExactIndex",
}
"""Settings class to index class (`base.BuildableIndex`), which is imported when it is needed."""

if TYPE_CHECKING:
    MemberSettings = IndexBase
else:
    MemberSettings = union_of(REGISTRY)


class HybridSettings(IndexBase):
    """Several indexes over one corpus, fused by reciprocal ranks (Cormack, Clarke, Buettcher 2009)."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"weights", "candidates"})

    type: Literal["hybrid"] = "hybrid"
    members: tuple[MemberSettings, ...] = Field(default=(Bm25Settings(), FaissFlatSettings()), min_length=1)
    """The indexes. Each is built into its own subfolder."""
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


REGISTRY[HybridSettings] = "retriever.index.hybrid:HybridIndex"

if TYPE_CHECKING:
    IndexSettings = IndexBase
else:
    IndexSettings = union_of(REGISTRY)
