"""What the settings of every index have in common: which of their fields decide what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from protocol.settings import Settings
from retriever.config_encoder import EncoderSettings, HashedEncoderSettings


class IndexBase(Settings):
    """What every index's settings can do."""

    SEARCH_TIME: ClassVar[frozenset[str]] = frozenset()
    """Fields that decide how a built index is searched and not what it holds: changing one needs no new build."""
    PLACEMENT: ClassVar[frozenset[str]] = frozenset()
    """Fields that decide where and with how much work, and neither what the index holds nor which hits a query gets."""

    def identity(self) -> dict[str, Any]:
        """What decides the content of a built index, as JSON-compatible values."""
        content: dict[str, Any] = self.model_dump(mode="json", exclude=set(self.SEARCH_TIME | self.PLACEMENT))
        encoder = getattr(self, "encoder", None)
        return content if encoder is None else content | {"encoder": encoder.identity()}

    def search_time(self) -> dict[str, Any]:
        """Values of SEARCH_TIME: together with the identity they decide which hits a query gets."""
        return self.model_dump(mode="json", include=set(self.SEARCH_TIME))


class DenseBase(IndexBase):
    """An index over vectors."""

    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """What turns passages and queries into vectors."""
    dtype: Literal["float32", "float16"] = "float32"
    """How the vectors are stored. float16 halves the disk and the memory; scores change in the fourth digit."""


class FileBase(DenseBase):
    """An index over vectors that may come as a file which somebody else built."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"file"})

    file: Path | None = None
    """A FAISS file to serve as it is, e.g. Search-R1's e5_Flat.index: one row a passage of the corpus, in its order,
    encoded by `encoder`. It stays where it is and is memory-mapped. None: vectors are built from the corpus."""

    def identity(self) -> dict[str, Any]:
        """With a file, the file is the content: settings of the build say nothing then. UserError if it is missing."""
        if self.file is None:
            return super().identity()
        from retriever.index.file_digest import file_digest

        return {"type": self.model_dump()["type"], "encoder": self.encoder.identity(), "file": file_digest(self.file)}


class ApproximateBase(FileBase):
    """An index that may miss some of the best passages, for corpora too large to scan for every query."""

    exact_below: int = Field(default=10_000, ge=0)
    """Corpora of fewer passages get no approximate index: scanning them is as fast, and exact."""
