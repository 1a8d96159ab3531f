"""Settings of the indexes. The union below is the registry: a new index is one file and one line here.

Every member has a lazy `build` and `open`, so that neither faiss nor bm25s is imported unless chosen. What decides the
content of an index is its identity: the manifest of a built index holds it, and serving refuses an index that was
built with another.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from protocol.settings import Settings
from retriever.config_encoder import EncoderSettings, HashedEncoderSettings

if TYPE_CHECKING:
    from retriever.index.base import Index, Source


class IndexBase(Settings):
    """What every index's settings can do."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset()
    """Fields that decide how a built index is searched and not what it holds: changing one needs no new build."""

    def identity(self) -> dict[str, Any]:
        """What decides the content of a built index, as JSON-compatible values."""
        content: dict[str, Any] = self.model_dump(mode="json", exclude=set(self.SEARCH_TIME))
        encoder = getattr(self, "encoder", None)
        return content if encoder is None else content | {"encoder": encoder.identity()}

    def search_time(self) -> dict[str, Any]:
        """The other fields: together with the identity they decide which hits a query gets."""
        return self.model_dump(mode="json", include=set(self.SEARCH_TIME))


class Bm25Settings(IndexBase):
    """Lexical ranking, Lucene's variant of BM25, memory-mapped. Needs no encoder."""

    type: Literal["bm25"] = "bm25"
    k1: float = Field(default=1.5, ge=0)
    """Saturation of the term frequency."""
    b: float = Field(default=0.75, ge=0, le=1)
    """Share of the length normalisation."""
    stopwords: Literal["none", "english"] = "none"
    """Words that are ignored in passages and queries. `english` makes large indexes faster, recall is about equal."""

    def build(self, source: Source, directory: Path) -> None:
        """Index the texts of `source` into `directory`, which exists."""
        from retriever.index.bm25 import build

        build(self, source, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote. `threads` is not used: scoring is single-threaded."""
        from retriever.index.bm25 import Bm25Index

        return Bm25Index(self, directory)


class FaissFlatSettings(IndexBase):
    """Exact inner product by FAISS on CPUs."""

    type: Literal["faiss_flat"] = "faiss_flat"
    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """What turns passages and queries into vectors."""

    def build(self, source: Source, directory: Path) -> None:
        """Encode the texts of `source` and write the FAISS index into `directory`, which exists."""
        source.vectors(self.encoder, "float32", directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote; to be called, and searched, in the thread that will own it."""
        from retriever.index.dense import DenseIndex
        from retriever.index.faiss_flat import FaissFlatVectors

        return DenseIndex(self.encoder.build(), FaissFlatVectors(directory, threads=threads))


class MemorySettings(IndexBase):
    """Exact inner product by numpy: the oracle for the other dense indexes, and enough for small corpora."""

    type: Literal["memory"] = "memory"
    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """What turns passages and queries into vectors."""

    def build(self, source: Source, directory: Path) -> None:
        """Encode the texts of `source` and write the vectors into `directory`, which exists."""
        source.vectors(self.encoder, "float32", directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote. `threads` is not used: numpy's BLAS takes OMP_NUM_THREADS."""
        from retriever.index.dense import DenseIndex
        from retriever.index.memory import MemoryVectors

        return DenseIndex(self.encoder.build(), MemoryVectors(directory))


IndexSettings = Annotated[Bm25Settings | FaissFlatSettings | MemorySettings, Field(discriminator="type")]
