"""Settings of the retriever: section `retriever` of the tree. Fields only; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from protocol.search import MAX_TOPK
from protocol.settings import Settings
from retriever.backends.web.config import WebSettings
from retriever.index.config import Bm25Settings, IndexSettings
from retriever.rerank.config import RerankSettings


class RetrieverSettings(Settings):
    """Section `retriever` of the tree."""

    id: str = Field(default="", max_length=200)
    """Name under which it registers in the run's Redis, if there is one. Empty: `<hostname>-<pid>`."""
    host: str = ""
    """Address to listen on. Addresses other than loopback need a token: FORAY_NODE_TOKEN in the environment
    (SECURITY.md). Empty: this machine's on the route to Redis, if the process has a token, else loopback."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port; 0: a free port, reported in the log and by `--port-file`."""
    corpus: Path = Path("corpus.jsonl")
    """Corpus file: one JSON object per line with at least `id` and `contents` (Search-R1's and FlashRAG's format).
    Optional if `index_dir` is set: a built index knows its corpus."""
    index_dir: Path | None = None
    """Directory of the built index. null: beside the corpus, named after it and the type of the index."""
    index: IndexSettings = Field(default_factory=Bm25Settings)
    """Type and build settings of the index. Optional if `index_dir` is a built index."""
    rerank: RerankSettings | None = None
    """Reranker: a model that reads the best hits together with the query and reorders them. null: none."""
    fields: tuple[str, ...] | None = None
    """Fields to return besides `id` and `contents` (`url`, `source`, ..). null: all fields of the corpus."""
    online: WebSettings | None = None
    """Web search engine instead of an index; then no corpus or index is opened."""
    topk: int = Field(default=3, ge=1, le=MAX_TOPK)
    """Hits per query if the request sets no `topk`, or 0."""
    window_ms: float = Field(default=5.0, ge=0, le=1000)
    """Maximum wait for more queries before a batch is searched, in milliseconds."""
    max_batch: int = Field(default=512, ge=1)
    """Maximum queries per batch."""
    token_ids: Path | None = None
    """Tokenizer (`tokenizer.json`) that decodes token ids sent to `/v1/embeddings`: that of the clients, cl100k_base
    for LangChain's default. Unset: token ids are refused, because another tokenizer would give wrong vectors."""
    queue_limit: int = Field(default=8192, ge=1)
    """Maximum queries and texts queued or in progress; further requests are handled as set by `overload`."""
    overload: Literal["refuse", "wait"] = "refuse"
    """Handling of requests when the queue is full. `refuse`: 429 with Retry-After immediately, on which Foray's rollout
    servers reduce their concurrency. `wait`: wait up to `overload_wait_s`, then 503: for clients that do not retry
    after 429 (verl, SkyRL), or never retry (Search-R1)."""
    overload_wait_s: float = Field(default=20.0, gt=0, le=3600)
    """Maximum wait of `overload: wait`, in seconds. Keep it below the client's timeout (verl, SkyRL: 30 s)."""
    cache_mb: float = Field(default=64.0, ge=0)
    """Size of the result cache, in MiB of passage text. 0: off."""
    threads: int = Field(default=0, ge=0)
    """Threads per FAISS search; 0: one per core. Use 1 if engines or the learner share the machine. BM25 scores this
    many queries at a time; 0: one."""
    build_limit_mb: float = Field(default=64.0, ge=0)
    """Build a missing index at start if the corpus is at most this large, in MiB; otherwise refuse to start."""
    verify_corpus: bool = True
    """Compare the corpus's SHA-256, and that of the file it was converted from, with the manifest at start; false, e.g.
    for tens of GB: compare only the sizes."""

    @property
    def index_path(self) -> Path:
        """Return the directory of the index, built or not."""
        return self.index_dir or self.corpus.with_name(f"{self.corpus.name}.{self.index.type}.index")

    @property
    def given_corpus(self) -> Path | None:
        """Return the configured corpus, None if a built index provides it."""
        return None if self.index_dir is not None and "corpus" not in self.model_fields_set else self.corpus

    @property
    def given_index(self) -> IndexSettings | None:
        """Return the configured index settings, None if a built index's manifest provides them."""
        return None if self.index_dir is not None and "index" not in self.model_fields_set else self.index

    @property
    def needed_corpus(self) -> Path | None:
        """Return the required corpus file, None if an index or a web search engine needs none."""
        return self.given_corpus if self.online is None else None
