"""Settings of the retriever. The unions below are the registry: a new index or encoder is one file and one line here.

Every member has a lazy `build` (and an index an `open`), so that neither faiss nor bm25s is imported unless chosen.
All fields of an index's settings take part in its identity: the manifest of a built index holds them, and serving
refuses an index that was built with others.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from protocol.search import MAX_TOPK
from protocol.settings import Settings

if TYPE_CHECKING:
    from retriever.encoder import Encoder
    from retriever.index.base import Index


class HashedEncoderSettings(Settings):
    """Lexical vectors from hashed words and character n-grams: no model, no download, the same on every machine."""

    type: Literal["hashed"] = "hashed"
    dim: int = Field(default=384, ge=8, le=65536)
    """Width of a vector."""
    ngram: int = Field(default=4, ge=2, le=8)
    """Length of the character n-grams (within words, which are padded with one `#` on each side)."""

    def build(self) -> Encoder:
        """The encoder."""
        from retriever.encoder import HashedEncoder

        return HashedEncoder(self)


EncoderSettings = HashedEncoderSettings
"""Union of the encoders (one member so far)."""


class IndexBase(Settings):
    """What every index's settings can do."""

    def identity(self) -> dict[str, Any]:
        """What decides the content of a built index, as JSON-compatible values."""
        return self.model_dump(mode="json")


class Bm25Settings(IndexBase):
    """Lexical ranking, Lucene's variant of BM25, memory-mapped. Needs no encoder."""

    type: Literal["bm25"] = "bm25"
    k1: float = Field(default=1.5, ge=0)
    """Saturation of the term frequency."""
    b: float = Field(default=0.75, ge=0, le=1)
    """Share of the length normalisation."""
    stopwords: Literal["none", "english"] = "none"
    """Words that are ignored in passages and queries. `english` makes large indexes faster, recall is about equal."""

    def build(self, texts: Iterable[str], directory: Path) -> None:
        """Index `texts` (row = position) into `directory`, which exists."""
        from retriever.index.bm25 import build

        build(self, texts, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote. `threads` is not used: scoring is single-threaded."""
        from retriever.index.bm25 import Bm25Index

        return Bm25Index(self, directory)


class FaissFlatSettings(IndexBase):
    """Exact inner product by FAISS on CPUs."""

    type: Literal["faiss_flat"] = "faiss_flat"
    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """What turns passages and queries into vectors."""

    def build(self, texts: Iterable[str], directory: Path) -> None:
        """Encode `texts` (row = position) and write the FAISS index into `directory`, which exists."""
        from retriever.index.faiss_flat import build

        build(self.encoder.build(), texts, directory)

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

    def build(self, texts: Iterable[str], directory: Path) -> None:
        """Encode `texts` (row = position) and write the vectors into `directory`, which exists."""
        from retriever.index.memory import build

        build(self.encoder.build(), texts, directory)

    def open(self, directory: Path, *, threads: int) -> Index:
        """The index that `build` wrote. `threads` is not used: numpy's BLAS takes OMP_NUM_THREADS."""
        from retriever.index.dense import DenseIndex
        from retriever.index.memory import MemoryVectors

        return DenseIndex(self.encoder.build(), MemoryVectors(directory))


IndexSettings = Annotated[Bm25Settings | FaissFlatSettings | MemorySettings, Field(discriminator="type")]


class RetrieverSettings(Settings):
    """Section `retriever` of the tree."""

    host: str = "127.0.0.1"
    """Address to listen on. The service has no authentication: keep it on a private network."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: a free port, told by the log line and by `--port-file`."""
    corpus: Path = Path("corpus.jsonl")
    """One JSON object a line with at least `id` and `contents` (Search-R1's and FlashRAG's corpus format)."""
    index_dir: Path | None = None
    """Directory of the built index. None: beside the corpus, named after it and the type of the index."""
    index: IndexSettings = Field(default_factory=Bm25Settings)
    """Which index, and how it was (or will be) built."""
    topk: int = Field(default=3, ge=1, le=MAX_TOPK)
    """Hits a query when the request names no `topk`."""
    window_ms: float = Field(default=5.0, ge=0, le=1000)
    """Longest wait for more queries before a batch is searched."""
    max_batch: int = Field(default=512, ge=1)
    """Most queries in one batch."""
    queue_limit: int = Field(default=8192, ge=1)
    """Queries waiting or being searched beyond which requests are answered 429 with Retry-After."""
    cache_mb: float = Field(default=64.0, ge=0)
    """Memory for answers already given, in MiB of passage text. 0 switches the cache off."""
    threads: int = Field(default=0, ge=0)
    """Threads of one FAISS search; 0: one a core. Take 1 where engines or the learner share the machine."""
    build_limit_mb: float = Field(default=64.0, ge=0)
    """A missing index is built at the start when the corpus is no larger than this (MiB); larger ones are refused."""
    verify_corpus: bool = True
    """Compare the corpus's SHA-256 with the manifest at the start; switch off for tens of GB (the size is compared)."""
    max_body_mb: float = Field(default=16.0, gt=0)
    """Largest request body (MiB); beyond it 413."""

    @property
    def index_path(self) -> Path:
        """Where the built index is, or will be."""
        return self.index_dir or self.corpus.with_name(f"{self.corpus.name}.{self.index.type}.index")
