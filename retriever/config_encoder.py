"""Settings of the encoders. The union below is the registry: a new encoder is one file and one line here.

Every member has a lazy `build`, so that torch is imported only where a model needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from protocol.settings import Settings

if TYPE_CHECKING:
    from retriever.encoder.base import Encoder


class EncoderBase(Settings):
    """What every encoder's settings can do."""

    def identity(self) -> dict[str, Any]:
        """What decides a vector, as JSON-compatible values: model, prefixes, pooling, length; not device or batch size.

        The manifest of an index holds it, and serving refuses an index whose passages were encoded otherwise.
        """
        return self.model_dump(mode="json")


class HashedEncoderSettings(EncoderBase):
    """Lexical vectors from hashed words and character n-grams: no model, no download, the same on every machine."""

    type: Literal["hashed"] = "hashed"
    dim: int = Field(default=384, ge=8, le=65536)
    """Width of a vector."""
    ngram: int = Field(default=4, ge=2, le=8)
    """Length of the character n-grams (within words, which are padded with one `#` on each side)."""

    def build(self) -> Encoder:
        """The encoder."""
        from retriever.encoder.hashed import HashedEncoder

        return HashedEncoder(self)


EncoderSettings = HashedEncoderSettings
"""Union of the encoders (one member so far)."""
