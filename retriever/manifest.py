"""`manifest.json` of a built index: what it was built from and how. Serving compares, and refuses what does not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import UserError
from retriever.corpus import file_sha256, open_corpus

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised whenever an index of the same settings would hold other content (tokenisation, hashing, file layout)."""


class Manifest(BaseModel):
    """Content of `manifest.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    fingerprint: str
    """16 hexadecimal digits over everything that decides which hits a query gets."""
    index: dict[str, Any]
    """The index's settings, type and encoder included."""
    passages: int
    corpus_bytes: int
    corpus_sha256: str
    files: dict[str, int]
    """Name and size of every other file in the directory."""

    @property
    def type(self) -> str:
        """Type of the index, e.g. `bm25`."""
        return str(self.index.get("type", "unknown"))


def make_manifest(
    index: dict[str, Any], passages: int, corpus_bytes: int, corpus_sha256: str, directory: Path
) -> Manifest:
    """The manifest of the files now in `directory`."""
    identity = {"format": FORMAT, "index": index, "passages": passages, "corpus_sha256": corpus_sha256}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return Manifest(
        **identity,
        fingerprint=hashlib.sha256(canonical.encode()).hexdigest()[:16],
        corpus_bytes=corpus_bytes,
        files={path.name: path.stat().st_size for path in sorted(directory.iterdir())},
    )


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a built index. UserError where it is missing or not one of ours."""
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{directory} is not a built index",
            why=f"{path.name}: {error.strerror or error}",
            todo=f"python -m retriever.build --corpus CORPUS.jsonl --out {directory} --index bm25",
        ) from None
    except ValidationError as error:
        raise UserError(
            f"{path} cannot be understood",
            why=f"{error.error_count()} fields are wrong; it may come from another version",
            todo="build the index again, with --overwrite",
        ) from None


def check_manifest(
    manifest: Manifest, directory: Path, index: dict[str, Any], corpus: Path, *, verify_corpus: bool
) -> None:
    """UserError unless the index was built from this corpus with these settings by this format, and is whole."""
    again = f"python -m retriever.build --corpus {corpus} --out {directory} --index {index['type']} --overwrite"
    if manifest.format != FORMAT:
        raise UserError(f"{directory} has index format {manifest.format}, this version reads {FORMAT}", todo=again)
    if manifest.index != index:
        raise UserError(
            f"{directory} was built with other settings than retriever.index",
            why="; ".join(_differences(manifest.index, index)),
            todo=f"change the settings, or build again: {again}",
        )
    for name, size in manifest.files.items():
        found = directory / name
        if not found.is_file() or found.stat().st_size != size:
            raise UserError(f"{found} is missing or damaged", why=f"{size} bytes were written", todo=again)
    size = open_corpus(corpus).stat().st_size
    if size != manifest.corpus_bytes or (verify_corpus and file_sha256(corpus) != manifest.corpus_sha256):
        raise UserError(
            f"{directory} was built from another corpus than {corpus}",
            why=f"size {manifest.corpus_bytes} then and {size} now, or other content of the same size",
            todo=f"give the right corpus, or build again: {again}",
        )


def _differences(built: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in sorted(built.keys() | asked.keys()):
        was, now = built.get(key, "absent"), asked.get(key, "absent")
        if isinstance(was, dict) and isinstance(now, dict):
            lines += _differences(was, now, f"{prefix}{key}.")
        elif was != now:
            lines.append(f"{prefix}{key}: built with {was}, asked for {now}")
    return lines
