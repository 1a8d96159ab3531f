"""Indexes over a corpus: one file each, all behind `base.Index`."""

from __future__ import annotations

import logging
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from retriever.encoder import encoder_identity
from retriever.index.config import REGISTRY, HybridSettings, IndexSettings

if TYPE_CHECKING:
    from retriever.index.base import BuildableIndex, Index, PassageSource

# before any import of faiss, which logs every instruction set missing in its wheel
logging.getLogger("faiss.loader").setLevel(logging.WARNING)


def write_index(settings: IndexSettings, source: PassageSource, directory: Path) -> None:
    """Build the index of the passages in `source` into `directory`, which exists."""
    _class_of(settings).build(settings, source, directory)


def open_index(settings: IndexSettings, directory: Path, *, threads: int) -> Index:
    """Open what `write_index` wrote, in the thread that will search it. `threads`: threads per FAISS search; 0: all."""
    return _class_of(settings)(settings, directory, threads=threads)


def index_identity(settings: IndexSettings) -> dict[str, Any]:
    """Return what determines the content of a built index, as JSON-compatible values.

    It is part of the index's manifest; serving refuses an index with another identity. With a `file`, the file is the
    content, and build settings are ignored. Raises UserError if the file is missing.
    """
    content: dict[str, Any] = settings.model_dump(mode="json", exclude=set(settings.SEARCH_TIME | settings.PLACEMENT))
    content |= settings.RETIRED
    if (file := getattr(settings, "file", None)) is not None:
        from retriever.index.store import file_digest

        content = {"type": settings.type, "file": file_digest(file)}
    if (encoder := getattr(settings, "encoder", None)) is not None:
        content["encoder"] = encoder_identity(encoder)
    if isinstance(settings, HybridSettings):
        content["members"] = [index_identity(member) for member in settings.members]
    defaults = {name: type(settings).model_fields[name].default for name in settings.ADDED}
    return {name: value for name, value in content.items() if name not in defaults or value != defaults[name]}


def search_time(settings: IndexSettings) -> dict[str, Any]:
    """Return the values of SEARCH_TIME: together with the identity they determine the hits of a query."""
    found: dict[str, Any] = settings.model_dump(mode="json", include=set(settings.SEARCH_TIME))
    if isinstance(settings, HybridSettings):
        found["members"] = [search_time(member) for member in settings.members]
    return found


def _class_of(settings: IndexSettings) -> type[BuildableIndex]:
    found: type[BuildableIndex] = resolve_name(REGISTRY[type(settings)])
    return found
