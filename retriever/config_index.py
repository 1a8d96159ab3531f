"""Settings of the indexes. The unions below are the registry: a new index is one file and one line here.

Every member has a lazy `build` and `open`, so that neither faiss nor bm25s is imported unless chosen. What decides the
content of an index is its identity: the manifest of a built index holds it, and serving refuses an index that was
built with another.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from retriever.config_index_base import DenseBase, IndexBase
from retriever.config_index_faiss import (
    FaissFlatSettings,
    FaissGpuSettings,
    FaissHnswSettings,
    FaissIvfPqSettings,
    FaissIvfSettings,
)

if TYPE_CHECKING:
    from retriever.index.base import Index, Source

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
        from retriever.index.memory import MemoryVectors

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
