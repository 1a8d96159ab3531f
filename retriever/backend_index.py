"""An index over a corpus as a backend: one owner thread for index, encoder and reranker, which none of them shares.

The thread that searches also opens: FAISS keeps its number of threads by thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.search import Passage
from retriever.backend import Fault, Kind
from retriever.cache import Answer
from retriever.config import RetrieverSettings
from retriever.encoder.base import EncoderUnavailable
from retriever.searcher import Searcher, open_searcher

log = logging.getLogger(__name__)

T = TypeVar("T")


class IndexBackend:
    """Made by `open_index`. As `backend.Backend`, and as `backend.Embedder` where the index has an encoder."""

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

    async def search(self, queries: Sequence[str], k: int, run: str) -> list[Answer | Fault]:
        """See `Backend`. One call of the index; when it fails, one call a query, so that only those fail that must."""
        return await self._one_by_one(lambda some: self.searcher.search(some, k), queries)

    async def embed(self, texts: Sequence[str], kind: Kind) -> list[npt.NDArray[np.float32] | Fault]:
        """See `Embedder`."""
        return await self._one_by_one(lambda some: list(self.searcher.embed(some, kind)), texts)

    async def _one_by_one(self, work: Callable[[Sequence[str]], list[T]], texts: Sequence[str]) -> list[T | Fault]:
        try:
            return [*await asyncio.get_running_loop().run_in_executor(self._owner, work, texts)]
        except EncoderUnavailable as error:
            if error.for_all or len(texts) == 1:
                log.warning("no vectors for %d texts: %s", len(texts), error)
                return [Fault(error.cause, error.detail)] * len(texts)
            return [outcome for text in texts for outcome in await self._one_by_one(work, [text])]
        except Exception as error:
            if len(texts) > 1:
                log.warning("a batch of %d failed (%r): trying its members one by one", len(texts), error)
                return [outcome for text in texts for outcome in await self._one_by_one(work, [text])]
            log.exception("the index failed on %r", texts[0])
            return [Fault("index", f"{type(error).__name__}: {error}")]

    async def find(self, passage_id: str) -> Passage | None:
        """See `Backend`. Reads the memory map, perhaps from a slow disk: not in the event loop, nor in the owner."""
        return await asyncio.to_thread(self.searcher.find, passage_id)

    def info(self) -> dict[str, Any]:
        """See `Backend`."""
        return self.searcher.info()

    async def close(self) -> None:
        """See `Backend`. Waits for the call that runs."""
        await asyncio.to_thread(self._owner.shutdown)


async def open_index(settings: RetrieverSettings) -> IndexBackend:
    """The index of `settings`, opened by its owner. UserError for all that a person must mend."""
    owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="owner")
    try:
        searcher = await asyncio.get_running_loop().run_in_executor(owner, open_searcher, settings)
    except BaseException:
        owner.shutdown(wait=False)
        raise
    return IndexBackend(searcher, owner)
