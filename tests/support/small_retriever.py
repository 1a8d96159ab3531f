"""What tests of indexes share: a source of passages in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from retriever.encoder import build_encoder
from retriever.encoder.config import EncoderSettings
from retriever.index import store


class TextSource:
    """Texts in memory as an `index.base.PassageSource`."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)

    @property
    def num_passages(self) -> int:
        return len(self._texts)

    def texts(self) -> Iterator[str]:
        return iter(self._texts)

    def vectors(self, settings: EncoderSettings, dtype: Literal["float32", "float16"], directory: Path) -> None:
        encoder = build_encoder(settings)
        store.create(directory, self.num_passages, encoder.dim, dtype)[:] = encoder.encode_passages(self._texts)
