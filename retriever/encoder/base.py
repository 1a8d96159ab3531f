"""What an encoder promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Passages and queries to L2-normalised float32 rows. One thread at a time.

    A text's vector does not depend on what else is in the batch, so that cached and fresh answers agree.
    """

    @property
    def dim(self) -> int:
        """Width of a vector."""

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dim]."""

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dim]."""
