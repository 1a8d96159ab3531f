"""The backend interface: an index over a corpus, or a web search engine.

    handlers --> QueryService (cache, joining, queue, batches) --> Backend.search --> one outcome per query

`search` is called from the event loop; a backend that computes does so in its own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from protocol.search import Passage

Kind = Literal["query", "passage"]
"""Whether a text is a query or a passage: some encoders use different prefixes."""


class QueryResult(NamedTuple):
    """Hits of one query, best first: documents as serialised JSON objects, and their scores."""

    documents: tuple[bytes, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class QueryFailure:
    """The failure of one query of a batch; other queries may succeed.

    cause  a short word for counters: index, timeout, quota, unreachable, http_NNN, garbage, ..
    """

    cause: str
    detail: str = ""


class Backend(Protocol):
    """A source of search results. Belongs to the service's event loop."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that determines a result: part of every cache key."""

    async def search(self, queries: Sequence[str], k: int) -> list[QueryResult | QueryFailure]:
        """Return one outcome per query, in order, with at most k documents each.

        Queries are normalised, distinct and not blank.
        """

    async def find(self, passage_id: str) -> Passage | None:
        """Return the document with this id: from the corpus or an earlier result; None if there is none.

        Never fetches an address supplied by a caller. Raises WebSearchError if the document is known but currently
        unavailable (its page does not answer).
        """

    def info(self) -> dict[str, Any]:
        """Return its part of the body of `/info`."""

    async def close(self) -> None:
        """Close threads and connections. Safe to call twice."""


class Embedder(Protocol):
    """A loaded encoder behind `/v1/embeddings`."""

    @property
    def model(self) -> str:
        """Return its name, for logs and responses."""

    async def embed(self, texts: Sequence[str], kind: Kind) -> list[npt.NDArray[np.float32] | QueryFailure]:
        """Return one vector [dim] of length 1 (or 0) per text, in order."""
