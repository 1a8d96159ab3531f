"""Settings of the rerankers: a stage after the index. The union below is the registry; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from retriever.config_encoder import Compute

if TYPE_CHECKING:
    from retriever.rerank.base import Reranker


class CrossEncoderSettings(Compute):
    """Every candidate is read together with its query by a classification model (ms-marco-MiniLM, bge-reranker).

    Far dearer than a vector index: queries times `candidates` forward passes.
    """

    type: Literal["cross_encoder"] = "cross_encoder"
    model: Path = Path("reranker")
    """Folder of an AutoModelForSequenceClassification with one label, or with two of which the second is `relevant`."""
    candidates: int = Field(default=50, ge=1)
    """Hits of the index that are scored again, best first; the others keep their order behind them. The index is asked
    for as many, or for `topk` where that is more."""
    max_tokens: int = Field(default=512, ge=8)
    """Query and document together are cut to so many tokens (the longer of the two first), special ones included."""

    def identity(self) -> dict[str, Any]:
        """What decides scores and so answers, as JSON-compatible values; part of the service's fingerprint. Not the
        place of the folder, device, dtype or batch."""
        from retriever.encoder.fingerprint import fingerprint

        deciding = self.model_dump(mode="json", include={"type", "candidates", "max_tokens"})
        return deciding | {"model": fingerprint(self.model)}

    def build(self) -> Reranker:
        """Load the model. To be called in the thread that will use it. UserError where it cannot be."""
        from retriever.rerank.cross_encoder import CrossEncoder

        return CrossEncoder(self)


RerankSettings = CrossEncoderSettings
"""Union of the rerankers (one member so far)."""
