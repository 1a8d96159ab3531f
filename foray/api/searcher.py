"""An index or a corpus in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from protocol.errors import UserError
from protocol.search import Passage
from retriever.config import RetrieverSettings

if TYPE_CHECKING:
    from retriever.backends.index import Searcher as Opened


class IndexSearcher:
    """Searches an index, or a corpus for which it builds one (BM25) beside it. Opened at the first search.

    index_dir  directory of an index (`foray index build`), or of a folder with one file `corpus.jsonl`
    corpus     file of passages, one JSON object a line with `id` and `contents`, or any format of docs/retrieval.md
    topk       number of passages that `search` returns by default

    A run that is given a Searcher starts a separate retriever on the same index.
    """

    def __init__(self, index_dir: str | Path = "", *, corpus: str | Path = "", topk: int = 3) -> None:
        directory = Path(index_dir) if index_dir else None
        if directory is not None and not corpus and (directory / "corpus.jsonl").is_file():
            directory, corpus = directory / "index", directory / "corpus.jsonl"
        if directory is None and not corpus:
            raise UserError("a Searcher needs an index or a corpus", todo='foray.Searcher("index") or corpus="file"')
        self.corpus = Path(corpus).absolute() if corpus else None
        self.index_dir = (directory or Path(f"{corpus}.index")).absolute()
        self.topk = topk
        self._lock = threading.Lock()
        self._opened: Opened | None = None

    @property
    def settings(self) -> RetrieverSettings:
        """Return the settings of a retriever for this index."""
        given = {"index_dir": self.index_dir} | ({} if self.corpus is None else {"corpus": self.corpus})
        return RetrieverSettings.model_validate(given)

    def search(self, query: str, topk: int | None = None) -> Sequence[Passage]:
        """Return the best passages for a query. Raises UserError for a missing or damaged index."""
        from retriever.backends.index import open_searcher

        with self._lock:  # an index belongs to one thread at a time
            if self._opened is None:
                self._opened = open_searcher(self.settings)
            (found,) = self._opened.search([query], topk or self.topk)
        return [Passage.model_validate_json(document) for document in found.documents]


Searcher: TypeAlias = IndexSearcher
LocalSearch: TypeAlias = IndexSearcher
"""Its public names; the second is that of a note on GRPO."""
