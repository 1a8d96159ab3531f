"""An encoder: counts of character pairs, for any script and without a vocabulary.

Its line in `retriever.encoder.config.REGISTRY`: `PairsSettings: "examples.extensions.encoder:PairsEncoder"`
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from pydantic import Field

from retriever.encoder.base import Vectors
from retriever.encoder.config import EncoderBase


class PairsSettings(EncoderBase):
    type: Literal["pairs"] = "pairs"
    dim: int = Field(default=512, ge=8)
    """Dimension of a vector."""


class PairsEncoder:
    normalized = True

    def __init__(self, settings: PairsSettings) -> None:
        self.dim = settings.dim

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(f" {text.lower()} " for text in texts):
            for first, second in pairwise(text):
                vectors[row, (ord(first) * 31 + ord(second)) % self.dim] += 1
        return vectors / np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))

    encode_queries = encode_passages
