"""`manifest.json` of a built index: what it was built from and how. Serving compares, and refuses what does not fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from protocol.errors import UserError
from protocol.runtime.files import sha256_file
from retriever.corpus.corpus import CorpusScan, open_corpus
from retriever.corpus.formats.synthetic import corpus_spec
from retriever.index import index_identity
from retriever.index.config import IndexSettings

MANIFEST = "manifest.json"
FORMAT = 2
"""Raised whenever an index of the same settings would hold other content (tokenisation, hashing, file layout)."""
_SETTINGS: TypeAdapter[IndexSettings] = TypeAdapter(IndexSettings)


class Manifest(BaseModel):
    """Content of `manifest.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    fingerprint: str
    """16 hexadecimal digits over everything that decides what the index holds."""
    index: dict[str, Any]
    """The index's identity: settings that decide its content, type and encoder included."""
    settings: dict[str, Any]
    """All settings of the index at the build, for opening it without settings."""
    passages: int
    corpus: str
    """Where the corpus is: a name in the index directory, or the absolute path at the build."""
    corpus_bytes: int
    corpus_sha256: str
    source: dict[str, Any]
    """What the corpus was made from: {"spec", "format", "words"}."""
    fields: tuple[str, ...] | None = None
    """What passages carry beside `id` and `contents`. None: not known, in an index of an older version."""
    files: dict[str, int]
    """Name and size (bytes) of every other file in the directory."""
    checksums: dict[str, str]
    """Name and SHA-256 of the same files."""

    @property
    def type(self) -> str:
        """Type of the index, e.g. `bm25`."""
        return str(self.index.get("type", "unknown"))

    @property
    def index_bytes(self) -> int:
        """Size of the directory without the manifest, the corpus included where it lies there."""
        return sum(self.files.values())


def make_manifest(
    directory: Path,
    *,
    index: IndexSettings,
    scan: CorpusScan,
    corpus: str,
    source: dict[str, Any],
    files: Sequence[str],
) -> Manifest:
    """Return the manifest of the files now in `directory`."""
    identity = {
        "format": FORMAT,
        "index": index_identity(index),
        "passages": scan.passages,
        "corpus_sha256": scan.sha256,
    }
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    # the converted corpus has been read once already, and it may have 14 GB
    known = {corpus: scan.sha256}
    return Manifest(
        **identity,
        fingerprint=hashlib.sha256(canonical.encode()).hexdigest()[:16],
        settings=index.model_dump(mode="json"),
        corpus=corpus,
        corpus_bytes=scan.bytes,
        source=source,
        fields=scan.fields,
        files={name: (directory / name).stat().st_size for name in files},
        checksums={name: known.get(name) or sha256_file(directory / name) for name in files},
    )


def corpus_of(directory: Path, configured: Path | None) -> Path:
    """Return the file of passages of a built index: the configured one, else what the manifest says.

    Where the configured corpus is the one that the index was made from, and it was converted, the file in the index
    directory is meant. UserError when there is no such file.
    """
    manifest = read_manifest(directory)
    if configured is not None and corpus_spec(configured) != manifest.source.get("spec"):
        return configured
    corpus = directory / manifest.corpus  # an absolute path stays what it is
    if not corpus.is_file():
        raise UserError(
            f"the corpus of {directory} is not where it was",
            why=f"no file {corpus}",
            todo="give retriever.corpus (or --corpus) the file's place now",
        )
    return corpus


def settings_of(directory: Path, changes: Mapping[str, Any] | None = None) -> IndexSettings:
    """Return the settings that a built index was built with, for those who give none; `changes` go on top of them.

    UserError when this version does not know the index's type or one of its settings.
    """
    content = read_manifest(directory).settings
    try:
        return _SETTINGS.validate_python(_merged(content, changes or {}))
    except ValidationError as error:
        raise UserError(
            f"{directory} cannot be opened with the settings in its manifest",
            why="; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()),
            todo="give the index's settings in the configuration, or build it again",
        ) from None


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        nested = isinstance(inner, dict) and isinstance(value, Mapping)
        merged[key] = _merged(inner, value) if nested and isinstance(inner, dict) else value
    return merged


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a built index. UserError if it is missing or damaged."""
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{directory} is not a built index",
            why=f"{path.name}: {error.strerror or error}",
            todo=f"foray index build --corpus CORPUS.jsonl --out {directory} --index bm25",
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
    """Raise UserError unless the index was built from this corpus with these settings by this format, and is whole."""
    origin = manifest.source.get("spec", corpus)
    again = f"foray index build --corpus {origin} --out {directory} --index {index['type']} --overwrite"
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
    if size != manifest.corpus_bytes or (verify_corpus and sha256_file(corpus) != manifest.corpus_sha256):
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
            lines.append(f"{prefix}{key}: built with {_shown(was)}, asked for {_shown(now)}")
    return lines


def _shown(value: Any) -> str:
    """Blanks count in a prefix, so text that has any, or nothing at all, is quoted."""
    quoted = isinstance(value, str) and (not value or any(map(str.isspace, value)))
    return repr(value) if quoted else str(value)
