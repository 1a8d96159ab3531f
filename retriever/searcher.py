"""An opened index with its corpus: queries in, documents out. Used by one thread, the owner, except `find`."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.search import Passage
from retriever.backend import Kind
from retriever.build import build_index
from retriever.build_corpus import refuse_large
from retriever.cache import Answer
from retriever.config import RetrieverSettings
from retriever.config_encoder import EncoderSettings
from retriever.config_index import IndexSettings
from retriever.corpus import Corpus
from retriever.formats.base import MAX_FIELDS
from retriever.index.base import NO_ROW, Index
from retriever.manifest import Manifest, check_manifest, corpus_of, read_manifest, settings_of
from retriever.reranking import Ranked, Reranking, open_reranking

log = logging.getLogger(__name__)


class Searcher:
    """Made by `open_searcher`."""

    def __init__(
        self,
        index: Index,
        corpus: Corpus,
        manifest: Manifest,
        settings: IndexSettings,
        reranking: Reranking | None,
        fields: Collection[str] | None = None,
    ) -> None:
        """`fields`: what documents carry beside id and contents, None: all that the corpus has."""
        self._fields = fields
        self._index, self._corpus, self._manifest, self._reranking = index, corpus, manifest, reranking
        self._encoder = _encoder_of(settings)
        self._search_time = settings.search_time()
        rerank = None if reranking is None else reranking.identity
        chosen = None if fields is None else sorted(fields)
        decides = json.dumps([manifest.fingerprint, self._search_time, rerank, chosen], sort_keys=True)
        self.fingerprint = hashlib.sha256(decides.encode()).hexdigest()[:16]
        """Of all that decides an answer: what the index holds, how it is searched, what orders the hits anew, which
        fields are sent."""

    @property
    def num_passages(self) -> int:
        """Size of the corpus."""
        return self._index.ntotal

    @property
    def embeds(self) -> bool:
        """Whether the index has an encoder."""
        return self._index.encoder is not None

    @property
    def model(self) -> str:
        """The encoder's name for people: its model's, or that of its folder, else its type."""
        if self._encoder is None:
            return "none"
        model = getattr(self._encoder, "model", self._encoder.type)
        return model.name if isinstance(model, Path) else str(model)

    def info(self) -> dict[str, Any]:
        """Its part of the body of `/info`."""
        return {
            "fingerprint": self.fingerprint,
            "index_fingerprint": self._manifest.fingerprint,
            "type": self._manifest.type,
            "index": self._manifest.index,
            "search_time": self._search_time,
            "encoder": None if self._encoder is None else self._encoder.identity(),
            "rerank": None if self._reranking is None else self._reranking.identity,
            "passages": self.num_passages,
            "fields": self._sent(),
            "corpus_sha256": self._manifest.corpus_sha256,
            "index_bytes": self._manifest.index_bytes,
        }

    def _sent(self) -> list[str] | None:
        """Names of the fields of documents beside id and contents, None where that is not known."""
        known, chosen = self._manifest.fields, self._fields
        if known is None or chosen is None:
            given = known if chosen is None else chosen
            return None if given is None else list(given)
        return [name for name in known if name in chosen]

    def search(self, queries: Sequence[str], k: int) -> list[Answer]:
        """The best documents of every query, best first: min(k, num_passages), fewer where an approximate index finds
        fewer."""
        hits = self._index.search(queries, k if self._reranking is None else max(k, self._reranking.candidates))
        ranked = list(map(_found, hits.rows.tolist(), hits.scores.tolist()))
        if self._reranking is not None:
            ranked = self._reranking.apply(queries, ranked, lambda row: self._corpus.passage(row).contents)
        return [Answer(tuple(map(self._document, rows[:k])), tuple(scores[:k])) for rows, scores in ranked]

    def embed(self, texts: Sequence[str], kind: Kind) -> npt.NDArray[np.float32]:
        """float32 [len(texts), dim]. Only where `embeds`."""
        encoder = self._index.encoder
        assert encoder is not None
        return encoder.encode_queries(texts) if kind == "query" else encoder.encode_passages(texts)

    def find(self, passage_id: str) -> Passage | None:
        """The passage with this id, or None. Any thread."""
        passage = self._corpus.find(passage_id)
        return None if passage is None else self._chosen(passage)

    def _document(self, row: int) -> bytes:
        return document_json(self._chosen(self._corpus.passage(row)))

    def _chosen(self, passage: Passage) -> Passage:
        further = passage.model_extra
        if self._fields is None or not further:
            return passage
        kept = {name: value for name, value in further.items() if name in self._fields}
        return Passage(id=passage.id, contents=passage.contents, **kept)


def _found(rows: list[int], scores: list[float]) -> Ranked:
    found = rows.index(NO_ROW) if NO_ROW in rows else len(rows)
    return rows[:found], scores[:found]


def _encoder_of(settings: IndexSettings) -> EncoderSettings | None:
    """The index's, or that of a hybrid's first member that has one: the one that the opened index shows."""
    for part in getattr(settings, "members", (settings,)):
        encoder: EncoderSettings | None = getattr(part, "encoder", None)
        if encoder is not None:
            return encoder
    return None


def document_json(passage: Passage) -> bytes:
    """A passage as it is sent."""
    further = passage.model_extra or {}
    return json.dumps({"id": passage.id, "contents": passage.contents, **further}, ensure_ascii=False).encode()


def open_searcher(settings: RetrieverSettings) -> Searcher:
    """Open the index, building it first when it is missing and the corpus is small.

    To be called in the thread that will search. UserError for all that a person must mend.
    """
    directory = settings.index_path
    if not directory.exists() and settings.given_corpus is not None:
        _build_if_small(settings)
    manifest = read_manifest(directory)
    chosen = settings.given_index or settings_of(directory)
    corpus = corpus_of(directory, settings.given_corpus)
    check_manifest(manifest, directory, chosen.identity(), corpus, verify_corpus=settings.verify_corpus)
    index = chosen.open(directory, threads=settings.threads)
    passages = Corpus(corpus, directory)
    if not index.ntotal == len(passages) == manifest.passages:
        raise UserError(
            f"{directory} is inconsistent",
            why=f"{index.ntotal} rows in the index, {len(passages)} offsets, {manifest.passages} in the manifest",
            todo="build the index again, with --overwrite",
        )
    _check_fields(manifest, settings.fields or ())
    reranking = None if settings.rerank is None else open_reranking(settings.rerank)
    return Searcher(index, passages, manifest, chosen, reranking, settings.fields)


def _check_fields(manifest: Manifest, fields: Collection[str]) -> None:
    """UserError for a field that no document has: it would be missing without a word."""
    known = manifest.fields
    if known is None or len(known) >= MAX_FIELDS:
        return  # an older index, or one whose corpus may have more than are listed
    if unknown := [name for name in fields if name not in known]:
        raise UserError(
            f"retriever.fields: the corpus has no field {unknown[0]!r}",
            why="beside `id` and `contents`, which are always sent, it has: " + (", ".join(known) or "none"),
            todo="correct the name or leave it out",
        )


def _build_if_small(settings: RetrieverSettings) -> None:
    directory = settings.index_path
    refuse_large(settings)
    log.info("no index at %s yet: building it", directory)
    try:
        build_index(settings.corpus, directory, settings.index, progress=log.info)
    except UserError:
        if not directory.exists():
            raise
        # another replica was faster; whether its index fits is checked like any other
