"""Settings of the memory of earlier searches: section `retriever.memory` of the tree. Fields only."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from protocol.settings import Settings
from retriever.encoder.config import EncoderSettings, HashedEncoderSettings


class SearchMemorySettings(Settings):
    """Per-run memory of earlier searches, in front of the real backend (docs/retrieval.md)."""

    encoder: EncoderSettings = Field(default_factory=HashedEncoderSettings)
    """Encoder for comparing queries. Independent of the index's encoder."""
    reuse_above: float | None = Field(default=0.95, ge=-1, le=1)
    """Answer a search with the most similar earlier one, without calling the backend, from this cosine on, if that
    search returned at least as many hits. null: never."""
    fuse: int = Field(default=0, ge=0, le=100)
    """Number of most similar earlier searches to fuse into an answer, by reciprocal ranks."""
    fuse_above: float = Field(default=0.6, ge=-1, le=1)
    """Minimum cosine of earlier searches to fuse."""
    fuse_weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of an earlier search's ranks; the new search has weight 1."""
    max_entries: int = Field(default=4096, ge=1, le=1_000_000)
    """Maximum searches per run; the least recently used is evicted first."""
    max_runs: int = Field(default=64, ge=1)
    """Maximum runs; the least recently used is evicted as a whole."""
    max_mb: float = Field(default=256.0, gt=0)
    """Memory for all runs, passages and vectors, in MiB."""
    directory: Path | None = None
    """Directory that keeps the memory across restarts. Replicas may share it: each has its own memory in it. null: not
    kept."""
