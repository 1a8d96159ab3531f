"""Settings of the rerankers: fields only. `retriever.rerank.REGISTRY` maps each class to its implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from retriever.encoder.config import ComputeSettings


class CrossEncoderSettings(ComputeSettings):
    """A classification model reads every candidate together with its query (ms-marco-MiniLM, bge-reranker).

    Far more expensive than a vector index: queries times `candidates` forward passes.
    """

    type: Literal["cross_encoder"] = "cross_encoder"
    model: Path = Path("reranker")
    """Folder of an AutoModelForSequenceClassification with one label, or two with `relevant` as the second."""
    candidates: int = Field(default=50, ge=1)
    """Hits to rerank, best first; the others follow in their order. The index returns this many, or `topk` if that is
    larger."""


RerankSettings = CrossEncoderSettings
"""Union of the rerankers (one member so far)."""
