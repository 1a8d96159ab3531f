"""Settings of the memory of earlier searches: section `retriever.memory` of the tree. Fields only."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from protocol.settings import Settings
from retriever.encoder.config import EncoderSettings, HashedEncoderSettings


class SearchMemorySettings(Settings):
    """What a run remembers of its earlier searches, as one more back-end before the real one (docs/retrieval.md)."""

    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """What makes queries comparable. Independent of the index's encoder."""
    reuse_above: float | None = Field(default=0.95, ge=-1, le=1)
    """A search is answered by the most similar earlier one, without asking the back-end, from this cosine on, if as
    many hits were asked for then. null: never."""
    fuse: int = Field(default=0, ge=0, le=100)
    """Number of most similar earlier searches whose passages are fused into an answer, by reciprocal ranks."""
    fuse_above: float = Field(default=0.6, ge=-1, le=1)
    """Earlier searches below this cosine are not fused."""
    fuse_weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of an earlier search's ranks; the new search's own weigh 1."""
    max_entries: int = Field(default=4096, ge=1, le=1_000_000)
    """Searches remembered of one run; the least recently used goes first."""
    max_runs: int = Field(default=64, ge=1)
    """Runs remembered; the least recently used goes first, whole."""
    max_mb: float = Field(default=256.0, gt=0)
    """Memory for all runs (MiB): passages and vectors."""
    directory: Path | None = None
    """Where the memory survives a restart. Replicas may share the directory: each has its own memory in it. null:
    nowhere."""
