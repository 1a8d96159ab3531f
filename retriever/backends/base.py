"""What a back-end promises: an index over a corpus, an online engine, a memory of earlier searches before either.

    handlers --> QueryService (cache, joining, queue, batches) --> Backend.search --> one outcome a query

`search` is called from the event loop; a back-end that computes does so in its own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from protocol.search import Passage

Kind = Literal["query", "passage"]
"""Which of an encoder's two sides a text is for: some put a prefix before each."""


class QueryResult(NamedTuple):
    """Hits of one query, best first: documents as JSON objects, ready to be sent, and their scores."""

    documents: tuple[bytes, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class QueryFailure:
    """Why one query of a batch has no result; the others have theirs.

    cause  a short word for counters: index, timeout, quota, unreachable, http_NNN, garbage, ..
    """

    cause: str
    detail: str = ""


class Backend(Protocol):
    """One source of answers. Belongs to the service's event loop."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides a result: part of every cache key."""

    async def search(self, queries: Sequence[str], k: int, run: str) -> list[QueryResult | QueryFailure]:
        """Return one outcome a query, in order, at most k documents each.

        Queries are normalised, distinct and not blank.

        run  whose memory is searched and extended; "" for callers that name none. Only `memory` uses it.
        """

    async def find(self, passage_id: str) -> Passage | None:
        """Return the document with this id: one of the corpus, or one of an earlier result. None if there is none.

        Never fetches an address that a caller made up. Raises WebSearchError if the document is known and cannot be
        had now (a page that does not answer).
        """

    def info(self) -> dict[str, Any]:
        """Its part of the body of `/info`."""

    async def close(self) -> None:
        """Close threads and connections. Safe to call twice."""


class Embedder(Protocol):
    """A loaded encoder behind `/v1/embeddings`."""

    @property
    def model(self) -> str:
        """Its name, for logs and answers."""

    async def embed(self, texts: Sequence[str], kind: Kind) -> list[npt.NDArray[np.float32] | QueryFailure]:
        """Return one vector [dim] of length 1 (or 0) a text, in order."""
