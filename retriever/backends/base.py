"""What answers queries: an index over a corpus, an online engine, a memory of earlier searches before either.

    handlers --> Searches (cache, joining, queue, batches) --> Backend.search --> one outcome a query

`search` is called from the event loop; a backend that computes does so in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from protocol.search import Passage
from retriever.serving.cache import Answer

Kind = Literal["query", "passage"]
"""Which of an encoder's two sides a text is for: some put a prefix before each."""


@dataclass(frozen=True)
class Fault:
    """Why one query of a batch has no answer; its neighbours have theirs.

    cause  a short word for counters: index, timeout, quota, unreachable, http_NNN, garbage, ..
    """

    cause: str
    detail: str = ""


class Backend(Protocol):
    """One source of answers. Belongs to the service's event loop."""

    @property
    def fingerprint(self) -> str:
        """Of everything that decides an answer: part of every cache key."""

    async def search(self, queries: Sequence[str], k: int, run: str) -> list[Answer | Fault]:
        """One outcome a query, in order, at most k documents each. Queries are normalised, distinct and not blank.

        run  whose memory is asked and fed; "" for callers that name none. Only `memory` looks at it.
        """

    async def find(self, passage_id: str) -> Passage | None:
        """The document with this id: one of the corpus, or one that an earlier answer brought. Never an address that
        a caller made up. None when there is none. Raises online.provider.Failed where it is known, and cannot be had
        now (a page that does not answer)."""

    def info(self) -> dict[str, Any]:
        """Its part of the body of `/info`."""

    async def close(self) -> None:
        """Let go of threads and connections. Safe to call twice."""


class Embedder(Protocol):
    """A loaded encoder behind `/v1/embeddings`."""

    @property
    def model(self) -> str:
        """Its name, for people."""

    async def embed(self, texts: Sequence[str], kind: Kind) -> list[npt.NDArray[np.float32] | Fault]:
        """One vector [dim] of length 1 (or 0) a text, in order."""
