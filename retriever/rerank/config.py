"""Settings of the rerankers: fields only. `retriever.rerank.REGISTRY` maps each class to its implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from retriever.encoder.config import ComputeSettings


class CrossEncoderSettings(ComputeSettings):
    """Every candidate is read together with its query by a classification model (ms-marco-MiniLM, bge-reranker).

    Far more expensive than a vector index: queries times `candidates` forward passes.
    """

    type: Literal["cross_encoder"] = "cross_encoder"
    model: Path = Path("reranker")
    """Folder of an AutoModelForSequenceClassification with one label, or with two of which the second is `relevant`."""
    candidates: int = Field(default=50, ge=1)
    """Hits of the index that are scored again, best first; the others keep their order behind them. The index is asked
    for as many, or for `topk` where that is more."""
    max_tokens: int = Field(default=512, ge=8)
    """Query and document together are cut to this many tokens (the longer of the two first), special ones included."""


RerankSettings = CrossEncoderSettings
"""Union of the rerankers (one member so far)."""
