"""An opened index with its corpus: queries in, documents out. Used by one thread, the owner, except `find`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from protocol.errors import UserError
from protocol.search import Passage
from retriever.build import build_index
from retriever.cache import Answer
from retriever.config import RetrieverSettings
from retriever.corpus import Corpus, open_corpus
from retriever.index.base import Index
from retriever.manifest import Manifest, check_manifest, read_manifest

log = logging.getLogger(__name__)


class Searcher:
    """Made by `open_searcher`."""

    def __init__(self, index: Index, corpus: Corpus, manifest: Manifest) -> None:
        self._index, self._corpus, self._manifest = index, corpus, manifest

    @property
    def fingerprint(self) -> str:
        """Of the index: part of every cache key."""
        return self._manifest.fingerprint

    @property
    def num_passages(self) -> int:
        """Size of the corpus."""
        return self._index.ntotal

    def info(self) -> dict[str, Any]:
        """Body of `/info`."""
        return {
            "fingerprint": self._manifest.fingerprint,
            "type": self._manifest.type,
            "index": self._manifest.index,
            "passages": self.num_passages,
            "corpus_sha256": self._manifest.corpus_sha256,
            "index_bytes": sum(self._manifest.files.values()),
        }

    def search(self, queries: Sequence[str], k: int) -> list[Answer]:
        """The best min(k, num_passages) documents of every query, best first."""
        hits = self._index.search(queries, k)
        return [
            Answer(tuple(self._document(row) for row in rows), tuple(scores))
            for rows, scores in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
        ]

    def find(self, passage_id: str) -> Passage | None:
        """The passage with this id, or None. Any thread."""
        return self._corpus.find(passage_id)

    def _document(self, row: int) -> bytes:
        return document_json(self._corpus.passage(row))


def document_json(passage: Passage) -> bytes:
    """A passage as it is sent."""
    return json.dumps({"id": passage.id, "contents": passage.contents}, ensure_ascii=False).encode()


def open_searcher(settings: RetrieverSettings) -> Searcher:
    """Open the index, building it first when it is missing and the corpus is small.

    To be called in the thread that will search. UserError for all that a person must mend.
    """
    directory = settings.index_path
    if not directory.exists():
        size = open_corpus(settings.corpus).stat().st_size
        if size > settings.build_limit_mb * 2**20:
            raise UserError(
                f"there is no index at {directory}",
                why=f"{settings.corpus} has {size / 2**20:.0f} MiB, and the service builds up to "
                f"retriever.build_limit_mb = {settings.build_limit_mb:g} by itself",
                todo=f"python -m retriever.build --corpus {settings.corpus} --out {directory} "
                f"--index {settings.index.type}",
            )
        log.info("no index at %s yet: building it", directory)
        try:
            build_index(settings.corpus, directory, settings.index, progress=log.info)
        except UserError:
            if not directory.exists():
                raise
            # another replica was faster; whether its index fits is checked below like any other
    manifest = read_manifest(directory)
    check_manifest(
        manifest, directory, settings.index.identity(), settings.corpus, verify_corpus=settings.verify_corpus
    )
    index = settings.index.open(directory, threads=settings.threads)
    corpus = Corpus(settings.corpus, directory)
    if not index.ntotal == len(corpus) == manifest.passages:
        raise UserError(
            f"{directory} is inconsistent",
            why=f"{index.ntotal} rows in the index, {len(corpus)} offsets, {manifest.passages} in the manifest",
            todo="build the index again, with --overwrite",
        )
    return Searcher(index, corpus, manifest)
