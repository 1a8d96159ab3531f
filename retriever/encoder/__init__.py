"""Encoders from text to vectors, one file each, all behind `base.Encoder`."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from retriever.encoder.config import REGISTRY, EncoderSettings, TransformerEncoderSettings

if TYPE_CHECKING:
    from retriever.encoder.base import Encoder


def build_encoder(settings: EncoderSettings) -> Encoder:
    """Load the encoder of `settings`, in the thread that will use it. Raises UserError if it cannot be loaded."""
    encoder: Encoder = resolve_name(REGISTRY[type(settings)])(settings)
    return encoder


def encoder_identity(settings: EncoderSettings) -> dict[str, Any]:
    """Return what determines a vector, as JSON-compatible values: model, prefixes, pooling, length.

    It is part of an index's manifest; serving refuses an index with another encoding. Raises UserError if
    the model's folder is missing or ambiguous.
    """
    if isinstance(settings, TransformerEncoderSettings):
        from retriever.encoder.folder import transformer_identity

        return transformer_identity(settings)
    return {**settings.model_dump(mode="json", exclude=set(settings.PLACEMENT)), **settings.RETIRED}
