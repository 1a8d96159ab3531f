"""An index over a corpus as a backend: one thread owns index, encoder and reranker.

    IndexBackend (event loop) --> owner thread: Searcher --> Index --> RerankStage --> documents of the Corpus

The searching thread also opens the index: FAISS sets its number of threads per thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.search import Passage
from retriever.backends.base import Kind, QueryFailure, QueryResult
from retriever.config import RetrieverSettings
from retriever.corpus.corpus import Corpus
from retriever.corpus.formats.base import MAX_FIELDS
from retriever.corpus.manifest import Manifest, check_manifest, corpus_of, read_manifest, settings_of
from retriever.encoder import encoder_identity
from retriever.encoder.base import EncoderUnavailable
from retriever.encoder.config import EncoderSettings
from retriever.index import index_identity, open_index, search_time
from retriever.index.base import NO_ROW, Index
from retriever.index.config import IndexSettings
from retriever.indexing.build import build_index
from retriever.indexing.input import refuse_large
from retriever.rerank import build_reranker, reranker_identity
from retriever.rerank.base import Reranker, order
from retriever.rerank.config import RerankSettings

log = logging.getLogger(__name__)
T = TypeVar("T")
Ranked = tuple[list[int], list[float]]
"""Rows of one query, best first, and their scores."""


class IndexBackend:
    """An index as `Backend`, and as `Embedder` if it has an encoder. Made by `open_index_backend`."""

    def __init__(self, searcher: Searcher, owner: ThreadPoolExecutor) -> None:
        self.searcher, self._owner = searcher, owner

    @property
    def fingerprint(self) -> str:
        """See `Backend`."""
        return self.searcher.fingerprint

    @property
    def model(self) -> str:
        """See `Embedder`."""
        return self.searcher.model

    async def search(self, queries: Sequence[str], k: int) -> list[QueryResult | QueryFailure]:
        """See `Backend`. One call of the index; if it fails, one call per query, so that only the bad ones fail."""
        return await self._one_by_one(lambda some: self.searcher.search(some, k), queries)

    async def embed(self, texts: Sequence[str], kind: Kind) -> list[npt.NDArray[np.float32] | QueryFailure]:
        """See `Embedder`."""
        return await self._one_by_one(lambda some: list(self.searcher.embed(some, kind)), texts)

    async def _one_by_one(
        self, work: Callable[[Sequence[str]], list[T]], texts: Sequence[str]
    ) -> list[T | QueryFailure]:
        try:
            return [*await asyncio.get_running_loop().run_in_executor(self._owner, work, texts)]
        except EncoderUnavailable as error:
            if error.for_all or len(texts) == 1:
                log.warning("no vectors for %d texts: %s", len(texts), error)
                return [QueryFailure(error.cause, error.detail)] * len(texts)
            return [outcome for text in texts for outcome in await self._one_by_one(work, [text])]
        except Exception as error:
            if len(texts) > 1:
                log.warning("a batch of %d failed (%r): retrying its queries one by one", len(texts), error)
                return [outcome for text in texts for outcome in await self._one_by_one(work, [text])]
            log.exception("the index failed on %r", texts[0])
            return [QueryFailure("index", f"{type(error).__name__}: {error}")]

    async def find(self, passage_id: str) -> Passage | None:
        """See `Backend`. Reads the memory map, possibly from a slow disk, outside the event loop and the owner
        thread."""
        return await asyncio.to_thread(self.searcher.find, passage_id)

    def info(self) -> dict[str, Any]:
        """See `Backend`."""
        return self.searcher.info()

    async def close(self) -> None:
        """See `Backend`. Waits for the running call."""
        await asyncio.to_thread(self._owner.shutdown)


async def open_index_backend(settings: RetrieverSettings) -> IndexBackend:
    """Open the index of `settings` in its owner thread. Raises UserError if settings, corpus or index are invalid."""
    owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="owner")
    try:
        searcher = await asyncio.get_running_loop().run_in_executor(owner, open_searcher, settings)
    except BaseException:
        owner.shutdown(wait=False)
        raise
    return IndexBackend(searcher, owner)


class Searcher:
    """An opened index with its corpus: maps queries to documents. Created by `open_searcher`.

    Belongs to one thread, the owner, except `find`.
    """

    def __init__(
        self,
        index: Index,
        corpus: Corpus,
        manifest: Manifest,
        settings: IndexSettings,
        reranking: RerankStage | None,
        fields: Collection[str] | None = None,
    ) -> None:
        """`fields`: further document fields besides id and contents; None: all fields of the corpus."""
        self._fields = fields
        self._index, self._corpus, self._manifest, self._reranking = index, corpus, manifest, reranking
        self._encoder = _encoder_of(settings)
        self._search_time = search_time(settings)
        rerank = None if reranking is None else reranking.identity
        chosen = None if fields is None else sorted(fields)
        decides = json.dumps([manifest.fingerprint, self._search_time, rerank, chosen], sort_keys=True)
        self.fingerprint = hashlib.sha256(decides.encode()).hexdigest()[:16]
        """Return a hash of all that determines a result: index, search settings, reranker, sent fields."""

    @property
    def num_passages(self) -> int:
        """Return the size of the corpus."""
        return self._index.ntotal

    @property
    def has_encoder(self) -> bool:
        """Return whether the index has an encoder."""
        return self._index.encoder is not None

    @property
    def model(self) -> str:
        """Return the encoder's name: that of its model or its folder, or its type."""
        if self._encoder is None:
            return "none"
        model = getattr(self._encoder, "model", self._encoder.type)
        return model.name if isinstance(model, Path) else str(model)

    def info(self) -> dict[str, Any]:
        """Return its part of the body of `/info`."""
        return {
            "fingerprint": self.fingerprint,
            "index_fingerprint": self._manifest.fingerprint,
            "type": self._manifest.type,
            "index": self._manifest.index,
            "search_time": self._search_time,
            "encoder": None if self._encoder is None else encoder_identity(self._encoder),
            "rerank": None if self._reranking is None else self._reranking.identity,
            "passages": self.num_passages,
            "fields": self._sent_fields(),
            "corpus_sha256": self._manifest.corpus_sha256,
            "index_bytes": self._manifest.index_bytes,
        }

    def _sent_fields(self) -> list[str] | None:
        """Return the names of fields besides id and contents, None if unknown."""
        known, chosen = self._manifest.fields, self._fields
        if known is None or chosen is None:
            given = known if chosen is None else chosen
            return None if given is None else list(given)
        return [name for name in known if name in chosen]

    def search(self, queries: Sequence[str], k: int) -> list[QueryResult]:
        """Return the best min(k, num_passages) documents of every query; an approximate index may find fewer."""
        hits = self._index.search(queries, k if self._reranking is None else max(k, self._reranking.candidates))
        ranked = list(map(_found, hits.rows.tolist(), hits.scores.tolist()))
        if self._reranking is not None:
            ranked = self._reranking.apply(queries, ranked, lambda row: self._corpus.passage(row).contents)
        return [QueryResult(tuple(map(self._document, rows[:k])), tuple(scores[:k])) for rows, scores in ranked]

    def embed(self, texts: Sequence[str], kind: Kind) -> npt.NDArray[np.float32]:
        """Return float32 [len(texts), dim]. Only where `has_encoder`."""
        encoder = self._index.encoder
        assert encoder is not None
        return encoder.encode_queries(texts) if kind == "query" else encoder.encode_passages(texts)

    def find(self, passage_id: str) -> Passage | None:
        """Return the passage with this id, or None. Any thread."""
        passage = self._corpus.find(passage_id)
        return None if passage is None else self._with_sent_fields(passage)

    def passages(self) -> Iterator[Passage]:
        """Yield all passages of the corpus, in its order."""
        return map(self._corpus.passage, range(len(self._corpus)))

    def _document(self, row: int) -> bytes:
        return document_json(self._with_sent_fields(self._corpus.passage(row)))

    def _with_sent_fields(self, passage: Passage) -> Passage:
        further = passage.model_extra
        if self._fields is None or not further:
            return passage
        kept = {name: value for name, value in further.items() if name in self._fields}
        return Passage(id=passage.id, contents=passage.contents, **kept)


def open_searcher(settings: RetrieverSettings) -> Searcher:
    """Open the index, building it first if it is missing and the corpus is small.

    Call it in the thread that will search. Raises UserError if a setting, the corpus or the index is invalid.
    """
    directory = settings.index_path
    if not directory.exists() and settings.given_corpus is not None:
        _build_if_small(settings)
    manifest = read_manifest(directory)
    chosen = settings.given_index or settings_of(directory)
    corpus = corpus_of(directory, settings.given_corpus, verify=settings.verify_corpus)
    check_manifest(manifest, directory, index_identity(chosen), corpus, verify_corpus=settings.verify_corpus)
    index = open_index(chosen, directory, threads=settings.threads)
    passages = Corpus(corpus, directory)
    if not index.ntotal == len(passages) == manifest.passages:
        raise UserError(
            f"{directory} is inconsistent",
            why=f"{index.ntotal} rows in the index, {len(passages)} offsets, {manifest.passages} in the manifest",
            todo="rebuild the index with --overwrite",
        )
    _check_fields(manifest, settings.fields or ())
    reranking = None if settings.rerank is None else open_rerank_stage(settings.rerank)
    return Searcher(index, passages, manifest, chosen, reranking, settings.fields)


def document_json(passage: Passage) -> bytes:
    """Return a passage in its sent form."""
    further = passage.model_extra or {}
    return json.dumps({"id": passage.id, "contents": passage.contents, **further}, ensure_ascii=False).encode()


class RerankStage:
    """The reranker between the index and the result. Belongs to the owner thread; created by `open_rerank_stage`.

    candidates  number of hits that are reranked; the others follow in their order
    identity    values that determine the scores
    """

    def __init__(self, reranker: Reranker, candidates: int, identity: dict[str, Any]) -> None:
        self._reranker, self.candidates, self.identity = reranker, candidates, identity

    def apply(self, queries: Sequence[str], ranked: Sequence[Ranked], text: Callable[[int], str]) -> list[Ranked]:
        """Return the hits of each query in their new order; `text` returns a row's contents.

        Scores are the reranker's, in one call for all queries. Hits that are not reranked get the lowest of these
        scores minus their distance, so that scores decrease with the rank throughout.
        """
        heads = [rows[: self.candidates] for rows, _ in ranked]
        asked = [(query, list(map(text, head))) for query, head in zip(queries, heads, strict=True)]
        results: list[Ranked] = []
        for head, (rows, _), scores in zip(heads, ranked, self._reranker.scores(asked), strict=True):
            places = order(scores)
            fresh = scores[places].tolist()
            rest = rows[len(head) :]
            behind = [fresh[-1] - distance for distance in range(1, len(rest) + 1)]
            results.append(([head[place] for place in places] + rest, fresh + behind))
        return results


def open_rerank_stage(settings: RerankSettings) -> RerankStage:
    """Load the model, in the thread that will use it. Raises UserError if it cannot be loaded."""
    return RerankStage(build_reranker(settings), settings.candidates, reranker_identity(settings))


def _found(rows: list[int], scores: list[float]) -> Ranked:
    found = rows.index(NO_ROW) if NO_ROW in rows else len(rows)
    return rows[:found], scores[:found]


def _encoder_of(settings: IndexSettings) -> EncoderSettings | None:
    """Return the encoder settings of the index, or of a hybrid's first member with an encoder, as the opened index
    does."""
    for part in getattr(settings, "members", (settings,)):
        encoder: EncoderSettings | None = getattr(part, "encoder", None)
        if encoder is not None:
            return encoder
    return None


def _check_fields(manifest: Manifest, fields: Collection[str]) -> None:
    """Raise UserError for a field that no document has; it would be silently missing."""
    known = manifest.fields
    if known is None or len(known) >= MAX_FIELDS:
        return  # an older index, or a corpus with possibly more fields than listed
    if unknown := [name for name in fields if name not in known]:
        raise UserError(
            f"retriever.fields: the corpus has no field {unknown[0]!r}",
            why="besides `id` and `contents`, which are always sent, it has: " + (", ".join(known) or "none"),
            todo="correct or remove the name",
        )


def _build_if_small(settings: RetrieverSettings) -> None:
    directory = settings.index_path
    refuse_large(settings)
    log.info("no index at %s: building it", directory)
    try:
        build_index(settings.corpus, directory, settings.index, progress=log.info)
    except UserError:
        if not directory.exists():
            raise
