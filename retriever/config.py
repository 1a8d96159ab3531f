"""Settings of the retriever: section `retriever` of the tree. Fields only; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from protocol.search import MAX_TOPK
from protocol.settings import Settings
from retriever.backends.memory.config import SearchMemorySettings
from retriever.backends.web.config import OnlineSettings
from retriever.index.config import Bm25Settings, IndexSettings
from retriever.rerank.config import RerankSettings


class RetrieverSettings(Settings):
    """Section `retriever` of the tree."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but loopback needs a token: FORAY_NODE_TOKEN in the environment (SECURITY.md)."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: a free port, named by the log line and by `--port-file`."""
    corpus: Path = Path("corpus.jsonl")
    """One JSON object a line with at least `id` and `contents` (Search-R1's and FlashRAG's corpus format). May be left
    out where `index_dir` is given: a built index knows its corpus."""
    index_dir: Path | None = None
    """Directory of the built index. None: beside the corpus, named after it and the type of the index."""
    index: IndexSettings = Field(default_factory=Bm25Settings)
    """Which index, and how it was (or will be) built. May be left out where `index_dir` names a built one."""
    rerank: RerankSettings | None = None
    """A model that reads the index's best hits again, together with the query, and reorders them. null: none."""
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
