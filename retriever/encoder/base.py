"""The interface of encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from protocol.errors import ForayError

Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Encodes passages and queries as float32 rows, compared by inner product. One thread at a time.

    A text's vector does not depend on what else is in the batch, so that cached and fresh answers agree: to the bit
    for `hashed`, to float noise for models (see `transformer`). Every number is finite.
    """

    @property
    def dim(self) -> int:
        """Return the dimension of a vector."""

    @property
    def normalized(self) -> bool:
        """Return whether rows have length 1 (or 0 for an empty text). False: any length, as in DPR and Contriever.

        A bound on the rounding of inner products must then include the lengths of query and passage.
        """

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return float32 [len(texts), dim]."""

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return float32 [len(texts), dim]."""


class NotFinite(ForayError):
    """A model returned NaN or infinity for a text: half precision overflowed, or its weights are broken."""


class EncoderUnavailable(ForayError):
    """The embedding service returned no vectors: unreachable, refused, or an invalid response.

    cause    a short word for counters
    for_all  all attempts failed independently of the texts. False: one text of the batch may be the cause.
    """

    def __init__(self, cause: str, detail: str, *, for_all: bool = False) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail, self.for_all = cause, detail, for_all


HALF = "try dtype bfloat16 or float32"
"""Hint for errors of local models."""


def check_finite(vectors: Vectors, texts: Sequence[str], where: str, hint: str = "") -> None:
    """Raise NotFinite with the first affected text unless all of vectors [len(texts), ...] are finite."""
    finite = np.isfinite(vectors)
    if not finite.all():
        wrong = np.flatnonzero(~finite.reshape(len(texts), -1).all(axis=1))
        raise NotFinite(
            f"{where} returned NaN or infinity for {len(wrong)} of {len(texts)} texts, the first being "
            f"{texts[wrong[0]][:80]!r}" + (hint and f"; {hint}")
        )
