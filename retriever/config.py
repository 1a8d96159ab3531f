"""Settings of the retriever: section `retriever` of the tree. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from protocol.settings import Settings
from retriever.encoder.config import Compute, EncoderSettings, HashedEncoderSettings

if TYPE_CHECKING:
    from retriever.rerank.base import Reranker
from typing import Self

from pydantic import model_validator

from protocol.search import MAX_TOPK
from retriever.backends.web.config import OnlineSettings
from retriever.index.config import Bm25Settings, IndexSettings

# Settings of the memory of earlier searches: section `retriever.memory` of the tree. Imports nothing heavy.


class SearchMemorySettings(Settings):
    """What a run remembers of its earlier searches, as one more back-end before the real one (docs/retrieval.md)."""

    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """What makes queries comparable. Independent of the index's encoder."""
    reuse_above: float | None = Field(default=0.95, ge=-1, le=1)
    """A search is answered by the most similar earlier one, without asking anybody, from this cosine on, provided that
    as many hits were asked for then. null: never."""
    fuse: int = Field(default=0, ge=0, le=100)
    """So many of the most similar earlier searches have their passages fused into an answer, by reciprocal ranks."""
    fuse_above: float = Field(default=0.6, ge=-1, le=1)
    """Earlier searches below this cosine are not fused."""
    fuse_weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of an earlier search's ranks; the new search's own weigh 1."""
    max_entries: int = Field(default=4096, ge=1, le=1_000_000)
    """Searches remembered of one run; the least recently used goes first."""
    max_runs: int = Field(default=64, ge=1)
    """Runs remembered; the least recently used goes first, whole."""
    max_mb: float = Field(default=256.0, gt=0)
    """Memory for all runs (MiB): passages and vectors."""
    directory: Path | None = None
    """Where it survives a restart. Replicas may share it: each has a memory of its own in it. null: nowhere."""


# Settings of the rerankers: a stage after the index. The union below is the registry; imports nothing heavy.


class CrossEncoderSettings(Compute):
    """Every candidate is read together with its query by a classification model (ms-marco-MiniLM, bge-reranker).

    Far dearer than a vector index: queries times `candidates` forward passes.
    """

    type: Literal["cross_encoder"] = "cross_encoder"
    model: Path = Path("reranker")
    """Folder of an AutoModelForSequenceClassification with one label, or with two of which the second is `relevant`."""
    candidates: int = Field(default=50, ge=1)
    """Hits of the index that are scored again, best first; the others keep their order behind them. The index is asked
    for as many, or for `topk` where that is more."""
    max_tokens: int = Field(default=512, ge=8)
    """Query and document together are cut to so many tokens (the longer of the two first), special ones included."""

    def identity(self) -> dict[str, Any]:
        """What decides scores and so answers, as JSON-compatible values; part of the service's fingerprint. Not the
        place of the folder, device, dtype or batch."""
        from retriever.encoder.folder import fingerprint

        deciding = self.model_dump(mode="json", include={"type", "candidates", "max_tokens"})
        return deciding | {"model": fingerprint(self.model)}

    def build(self) -> Reranker:
        """Load the model. To be called in the thread that will use it. UserError where it cannot be."""
        from retriever.rerank.cross_encoder import CrossEncoder

        return CrossEncoder(self)


RerankSettings = CrossEncoderSettings
"""Union of the rerankers (one member so far)."""


class RetrieverSettings(Settings):
    """Section `retriever` of the tree."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but loopback needs a token: FORAY_NODE_TOKEN in the environment (SECURITY.md)."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: a free port, told by the log line and by `--port-file`."""
    corpus: Path = Path("corpus.jsonl")
    """One JSON object a line with at least `id` and `contents` (Search-R1's and FlashRAG's corpus format). May be left
    out where `index_dir` is given: a built index knows its corpus."""
    index_dir: Path | None = None
    """Directory of the built index. None: beside the corpus, named after it and the type of the index."""
    index: IndexSettings = Field(default_factory=Bm25Settings)
    """Which index, and how it was (or will be) built. May be left out where `index_dir` names a built one."""
    rerank: RerankSettings | None = None
    """A model that reads the index's best hits again, together with the query, and orders them anew. null: none."""
    fields: tuple[str, ...] | None = None
    """What documents carry beside `id` and `contents` (`url`, `source`, ..). null: all that the corpus has."""
    online: OnlineSettings | None = None
    """An online search engine that is asked in place of an index: then no corpus and no index are opened."""
    memory: SearchMemorySettings | None = None
    """What is remembered of the searches of a run, for requests that name one. null: nothing."""
    topk: int = Field(default=3, ge=1)
    """Hits a query when the request names no `topk`, or 0."""
    max_topk: int = Field(default=MAX_TOPK, ge=1)
    """Most hits a query. Above it requests are answered 400 where the corpus has more passages than this, and with the
    whole corpus else."""
    window_ms: float = Field(default=5.0, ge=0, le=1000)
    """Longest wait for more queries before a batch is searched."""
    max_batch: int = Field(default=512, ge=1)
    """Most queries in one batch."""
    embed_batch: int = Field(default=64, ge=1)
    """Most texts of `/v1/embeddings` in one call of the encoder: searches wait for no longer call than that."""
    queue_limit: int = Field(default=8192, ge=1)
    """Queries and texts waiting or being searched beyond which requests are answered as `overload` says."""
    overload: Literal["refuse", "wait"] = "refuse"
    """What happens to a request when the queue is full. `refuse`: 429 with Retry-After at once, which Foray's rollout
    servers take as the sign to ask less. `wait`: it waits up to `overload_wait_s` for its turn, then 503: for clients
    that do not try again after 429 (verl, SkyRL), or never (Search-R1)."""
    overload_wait_s: float = Field(default=20.0, gt=0, le=3600)
    """Longest wait of `overload: wait` (s). Below the client's timeout: verl's and SkyRL's are 30 s."""
    cache_mb: float = Field(default=64.0, ge=0)
    """Memory for answers already given, in MiB of passage text. 0 switches the cache off."""
    threads: int = Field(default=0, ge=0)
    """Threads of one FAISS search; 0: one a core. Take 1 where engines or the learner share the machine."""
    build_limit_mb: float = Field(default=64.0, ge=0)
    """A missing index is built at the start when the corpus is no larger than this (MiB); larger ones are refused."""
    verify_corpus: bool = True
    """Compare the corpus's SHA-256 with the manifest at the start; switch off for tens of GB (the size is compared)."""
    max_body_mb: float = Field(default=16.0, gt=0)
    """Largest request body (MiB); beyond it 413. Four such bodies are held at once, of all requests together; each
    until its request is answered."""
    max_hits: int = Field(default=200_000, ge=1)
    """Most hits that one request may ask for, queries times `topk`; beyond it 400."""

    @model_validator(mode="after")
    def _default_fits(self) -> Self:
        for name in ("max_topk", "max_hits"):
            if self.topk > (most := getattr(self, name)):
                raise ValueError(
                    f"topk = {self.topk} is more than {name} = {most}: every default request would be refused"
                )
        return self

    @property
    def index_path(self) -> Path:
        """Where the built index is, or will be."""
        return self.index_dir or self.corpus.with_name(f"{self.corpus.name}.{self.index.type}.index")

    @property
    def given_corpus(self) -> Path | None:
        """The corpus, unless it is left to a built index to name it."""
        return None if self.index_dir is not None and "corpus" not in self.model_fields_set else self.corpus

    @property
    def given_index(self) -> IndexSettings | None:
        """The index's settings, unless they are left to a built index's manifest."""
        return None if self.index_dir is not None and "index" not in self.model_fields_set else self.index

    @property
    def needed_corpus(self) -> Path | None:
        """The file without which there is nothing to serve, None where an index or an online engine needs none."""
        return self.given_corpus if self.online is None else None
