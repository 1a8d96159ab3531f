"""Settings of the indexes: fields only. `retriever.index.config.REGISTRY` maps each class to its implementation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from protocol.settings import Settings, union_of
from retriever.encoder.config import EncoderSettings, HashedEncoderSettings

TEMP_BYTES = 512 << 20
"""Scratch memory per device: FAISS's own default would be up to 1.5 GiB."""


class IndexBase(Settings):
    """Base of the indexes' settings: the roles of their fields."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset()
    """Fields that affect the search, not the content of a built index: a change needs no rebuild."""
    PLACEMENT: ClassVar[frozenset[str]] = frozenset()
    """Fields that affect only resources, neither the index's content nor the hits."""
    ADDED: ClassVar[frozenset[str]] = frozenset()
    """Fields newer than the index format: their defaults are not part of the identity, so that indexes built
    before them still match."""
    RETIRED: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that were removed and are still part of the identity, so that built indexes still match."""

    type: str


class DenseBase(IndexBase):
    """An index over vectors."""

    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """Encoder of passages and queries."""
    dtype: Literal["float32", "float16"] = "float32"
    """Dtype of the stored vectors. float16 halves disk and memory; scores change in the fourth digit."""


class FileBase(DenseBase):
    """An index over vectors, optionally from a file built elsewhere."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file"})

    file: Path | None = None
    """A prebuilt FAISS file to serve unchanged, e.g. Search-R1's e5_Flat.index: one row per passage, in corpus order,
    encoded with `encoder`. It is memory-mapped in place. null: build vectors from the corpus."""


class ApproximateBase(FileBase):
    """An index that may miss some of the best passages, for corpora too large to scan for every query."""

    exact_below: int = Field(default=10_000, ge=0)
    """Minimum passages for an approximate index: scanning fewer is as fast, and exact."""


class FaissFlatSettings(FileBase):
    """Exact inner product with FAISS on CPUs, directly on the memory-mapped vectors."""

    type: Literal["faiss_flat"] = "faiss_flat"


class DeviceFlatBase(FileBase):
    """An exact scan of all vectors, each device with its share."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"precision"})
    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file", "devices"})

    devices: tuple[int, ...] = ()
    """CUDA ordinals of the GPUs that share the vectors, in this order. Empty: all visible ones; for `torch_flat` the
    CPU if there are none."""
    precision: Literal["float16", "float32"] = "float16"
    """Dtype on the devices. Hits are exact with both, because candidates are rescored from the stored vectors. float16
    halves the memory; on a CPU it is several times slower than float32."""


class FaissGpuSettings(DeviceFlatBase):
    """Exact scan of all vectors on GPUs with FAISS. Needs a FAISS wheel with GPU support."""

    type: Literal["faiss_gpu"] = "faiss_gpu"


class TorchFlatSettings(DeviceFlatBase):
    """Exact scan of all vectors with torch, on GPUs or the CPU. Needs no FAISS, except to read `file`."""

    type: Literal["torch_flat"] = "torch_flat"


class FaissHnswSettings(ApproximateBase):
    """A navigable graph (Malkov and Yashunin 2018, arXiv 1603.09320): the fastest on CPUs, all vectors in memory."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"ef_search"})
    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file", "build_threads"})

    type: Literal["faiss_hnsw"] = "faiss_hnsw"
    m: int = Field(default=32, ge=2, le=512)
    """Links per passage on every level but the lowest, which has twice as many: 8 * m bytes per passage."""
    ef_construction: int = Field(default=128, ge=1)
    """Length of the candidate list during the build: longer is slower and better."""
    ef_search: int = Field(default=128, ge=1)
    """Length of the candidate list of a search (at least k)."""
    build_threads: int = Field(default=0, ge=0)
    """Threads of the build; 0: OMP_NUM_THREADS, or one per core. Only 1 gives a reproducible graph."""


class IvfBase(ApproximateBase):
    """Inverted lists around centroids: the `nprobe` of `nlist` lists nearest to the query are scanned."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"nprobe"})
    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file", "devices"})
    RETIRED: ClassVar[Mapping[str, Any]] = {"train_size": 0, "seed": 0}

    nlist: int = Field(default=0, ge=0)
    """Number of lists. 0: the power of two nearest to 4 * sqrt(passages), with at least 39 passages per list."""
    nprobe: int = Field(default=64, ge=1)
    """Lists scanned per query."""
    devices: tuple[int, ...] = ()
    """CUDA ordinals of the GPUs that share the lists. Empty: the CPU."""


class FaissIvfSettings(IvfBase):
    """Inverted lists of whole vectors (IVF-Flat, Sivic and Zisserman 2003)."""

    type: Literal["faiss_ivf"] = "faiss_ivf"


class FaissIvfPqSettings(IvfBase):
    """Inverted lists of product-quantised vectors (Jegou et al. 2011, doi 10.1109/TPAMI.2010.57): `pq_parts` bytes
    each.

    Approximate scores come from the codes; the best candidates are rescored from the stored vectors.
    """

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset({"nprobe", "refine"})

    type: Literal["faiss_ivfpq"] = "faiss_ivfpq"
    pq_parts: int = Field(default=0, ge=0)
    """Parts of a vector, one code each; must divide the dimension. 0: at most the dimension divided by 8."""
    pq_bits: int = Field(default=8, ge=4, le=12)
    """Bits per code."""
    opq: bool = False
    """Train a rotation first (Ge et al. 2013, OPQ): better codes, minutes of extra training."""
    refine: int = Field(default=16, ge=1)
    """Candidates per hit that are rescored exactly; 1 only reorders the k best codes."""


class Bm25Settings(IndexBase):
    """Lexical ranking, Lucene's variant of BM25, memory-mapped. Needs no encoder.

    For the scores of pyserini and Anserini: k1=0.9 b=0.4 tokens=lucene stopwords=lucene stemming=porter.
    """

    ADDED: ClassVar[frozenset[str]] = frozenset({"tokens", "stemming"})

    type: Literal["bm25"] = "bm25"
    k1: float = Field(default=1.5, ge=0)
    """Saturation of the term frequency."""
    b: float = Field(default=0.75, ge=0, le=1)
    """Strength of the length normalisation."""
    stopwords: Literal["none", "english", "lucene"] = "none"
    """Ignored words in passages and queries. `english` makes large indexes faster with about equal recall;
    `lucene` are the 33 of Lucene's EnglishAnalyzer."""
    tokens: Literal["words", "lucene"] = "words"
    """Definition of a word. `words`: two or more letters, digits or underscores. `lucene`: as in Lucene's
    EnglishAnalyzer (Unicode annex 29, without the possessive 's), with lengths rounded as in Lucene."""
    stemming: Literal["none", "porter"] = "none"
    """`porter`: index and search English stems (Porter 1980)."""


class MemoryIndexSettings(DenseBase):
    """Exact inner product with numpy: the reference for other dense indexes, sufficient for small corpora."""

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
    TorchFlatSettings: "retriever.index.torch_flat:TorchFlatIndex",
}
"""Settings class -> index class (`base.BuildableIndex`), imported on demand."""

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
    """One weight per member, in order: a hit of rank r adds weight / (60 + r). Empty: all 1."""
    candidates: int = Field(default=100, ge=1)
    """Hits from every member (at least k)."""

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
            raise ValueError("a weight must be above 0: remove the member instead")
        return self


REGISTRY[HybridSettings] = "retriever.index.hybrid:HybridIndex"

if TYPE_CHECKING:
    IndexSettings = IndexBase
else:
    IndexSettings = union_of(REGISTRY)
