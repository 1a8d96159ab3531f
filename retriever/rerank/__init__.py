"""Rerankers: a second, more expensive look at the best hits of an index, one file each, all behind `base.Reranker`."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from retriever.rerank.config import CrossEncoderSettings, RerankSettings

if TYPE_CHECKING:
    from retriever.rerank.base import Reranker

REGISTRY: dict[type[RerankSettings], str] = {CrossEncoderSettings: "retriever.rerank.cross_encoder:CrossEncoder"}
"""Settings class to reranker class, which is imported when it is needed."""


def build_reranker(settings: RerankSettings) -> Reranker:
    """Load the model, in the thread that will use it. UserError if it cannot be loaded."""
    reranker: Reranker = resolve_name(REGISTRY[type(settings)])(settings)
    return reranker


def reranker_identity(settings: RerankSettings) -> dict[str, Any]:
    """Return what decides scores and so answers, as JSON-compatible values; part of the service's fingerprint.

    Not the place of the folder, device, dtype or batch.
    """
    from retriever.encoder.folder import fingerprint

    deciding = settings.model_dump(mode="json", exclude=set(settings.PLACEMENT))
    return deciding | {"model": fingerprint(settings.model)}
