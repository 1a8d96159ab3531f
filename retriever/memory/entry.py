"""One remembered search, and the documents in it by their ids."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retriever.cache import Answer

_OVERHEAD = 600
"""Roughly what CPython adds to an entry with a few documents (bytes)."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A search that was answered.

    query   normalised
    k       hits that were asked for
    vector  float32 [dim] of length 1, or 0 for a query that the encoder knows no word of
    answer  the back-end's own, not what was made of it with earlier ones
    """

    query: str
    k: int
    vector: npt.NDArray[np.float32]
    answer: Answer

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        # the vector is here and in the run's matrix
        return _OVERHEAD + 4 * len(self.query) + 2 * self.vector.nbytes + sum(map(len, self.answer.documents))


def document_id(document: bytes) -> str:
    """The id of a document as it is sent."""
    return str(json.loads(document).get("id", ""))
