"""Rerankers: a second, more expensive ranking of an index's best hits, one file each, behind `base.Reranker`."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from retriever.rerank.config import CrossEncoderSettings, RerankSettings

if TYPE_CHECKING:
    from retriever.rerank.base import Reranker

REGISTRY: dict[type[RerankSettings], str] = {CrossEncoderSettings: "retriever.rerank.cross_encoder:CrossEncoder"}
"""Settings class -> reranker class, imported on demand."""


def build_reranker(settings: RerankSettings) -> Reranker:
    """Load the model, in the thread that will use it. Raises UserError if it cannot be loaded."""
    reranker: Reranker = resolve_name(REGISTRY[type(settings)])(settings)
    return reranker


def reranker_identity(settings: RerankSettings) -> dict[str, Any]:
    """Return what determines scores and thus answers, as JSON-compatible values; part of the service's fingerprint.

    Excludes the folder's location, device, dtype and batch.
    """
    from retriever.encoder.folder import fingerprint

    deciding = settings.model_dump(mode="json", exclude=set(settings.PLACEMENT))
    return deciding | {"max_tokens": 512, "model": fingerprint(settings.model)}
