"""`manifest.json` of a built index: corpus and settings of the build. Serving compares them and refuses mismatches."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from protocol.errors import UserError
from protocol.runtime.files import sha256_file
from protocol.runtime.records import record_files
from protocol.runtime.settings_errors import without_removed
from retriever.corpus.corpus import CorpusScan, open_corpus
from retriever.corpus.formats.base import PASSAGES
from retriever.corpus.formats.synthetic import corpus_spec
from retriever.index import index_identity
from retriever.index.config import IndexSettings

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 2
"""Increased whenever the same settings give other index content (tokenisation, hashing, file layout)."""
_SETTINGS: TypeAdapter[IndexSettings] = TypeAdapter(IndexSettings)


class Manifest(BaseModel):
    """Content of `manifest.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    fingerprint: str
    """16 hexadecimal digits of everything that determines the index's content."""
    index: dict[str, Any]
    """The index's identity: settings that determine its content, including type and encoder."""
    settings: dict[str, Any]
    """All settings of the index at the build, for opening it without settings."""
    passages: int
    corpus: str
    """Location of the corpus: a name in the index directory, or the absolute path at the build."""
    corpus_bytes: int
    corpus_sha256: str
    source: dict[str, Any]
    """Origin of the corpus: {"spec", "format", "words"}, and `input_facts` of a converted one."""
    fields: tuple[str, ...] | None = None
    """Further fields of passages besides `id` and `contents`. None: unknown (an index of an older version)."""
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
        """Return the size of the directory without the manifest, including a corpus in it."""
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
    # the converted corpus has already been read once, and may have 14 GB
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


def input_facts(paths: Sequence[Path], *, whole: bool = True) -> dict[str, Any]:
    """Return size and, if `whole`, SHA-256 of the files that a corpus is converted from."""
    size = {"bytes": sum(path.stat().st_size for path in paths)}
    return size | ({"sha256": hashlib.sha256("".join(map(sha256_file, paths)).encode()).hexdigest()} if whole else {})


def corpus_of(directory: Path, configured: Path | None, *, verify: bool = False) -> Path:
    """Return the corpus file of a built index: the configured one, else the manifest's.

    If the index was built from a converted copy of the configured corpus, this is the copy in the index directory.
    Raises UserError if the file does not exist, or if the configured corpus has changed since: its size is compared,
    with `verify` its SHA-256 too.
    """
    manifest = read_manifest(directory)
    if configured is not None and corpus_spec(configured) != manifest.source.get("spec"):
        return configured
    corpus = directory / manifest.corpus  # an absolute path is unchanged
    if not corpus.is_file():
        raise UserError(
            f"the corpus of {directory} was moved or removed",
            why=f"no file {corpus}",
            todo="set retriever.corpus (or --corpus) to its current path",
        )
    converted = manifest.source.get("format") != "synthetic" and corpus.parent.absolute() == directory.absolute()
    if configured is not None and converted and configured.absolute() != corpus.absolute():
        files = record_files(configured, PASSAGES)
        if not all(path.is_file() for path in files):
            return corpus  # removed after the conversion, which needs it no longer
        if "sha256" not in manifest.source:
            _say_unverified(configured, _rebuild(manifest, directory, configured))
            return corpus
        now = input_facts(files, whole=verify)
        if any(manifest.source.get(name) != value for name, value in now.items()):
            raise UserError(
                f"{configured} has changed since {directory} was built from it",
                why=f"its size was {manifest.source.get('bytes')} and is now {now['bytes']}, or its content changed",
                todo=f"rebuild: {_rebuild(manifest, directory, configured)}",
            )
    return corpus


@cache
def _say_unverified(corpus: Path, again: str) -> None:
    """Say it once in this process."""
    why = "an older version built the index and kept no checksum of it"
    log.warning(
        "unverified: whether %s has changed since it was indexed is unknown, because %s; %s", corpus, why, again
    )


def _rebuild(manifest: Manifest, directory: Path, corpus: Path) -> str:
    source = manifest.source
    words = f" --words {source['words']}" if source.get("words") else ""
    origin = source.get("spec", corpus)
    return f"foray index build --corpus {origin}{words} --out {directory} --index {manifest.type} --overwrite"


def settings_of(directory: Path, changes: Mapping[str, Any] | None = None) -> IndexSettings:
    """Return the settings that a built index was built with, used if none are configured, with `changes` applied.

    Raises UserError if this version does not know the index's type or one of its settings.
    """
    content = _merged(read_manifest(directory).settings, changes or {})
    try:
        return _SETTINGS.validate_python(content)
    except ValidationError as error:
        content = without_removed(content, error, "retriever.index")
    try:
        return _SETTINGS.validate_python(content)
    except ValidationError as error:
        raise UserError(
            f"{directory} cannot be opened with the settings in its manifest",
            why="; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()),
            todo="set the index's settings in the configuration, or rebuild it",
        ) from None


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        nested = isinstance(inner, dict) and isinstance(value, Mapping)
        merged[key] = _merged(inner, value) if nested and isinstance(inner, dict) else value
    return merged


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a built index. Raises UserError if it is missing or damaged."""
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
            f"cannot read {path}",
            why=f"{error.error_count()} fields are invalid; it may come from another version",
            todo="rebuild the index with --overwrite",
        ) from None


def check_manifest(
    manifest: Manifest, directory: Path, index: dict[str, Any], corpus: Path, *, verify_corpus: bool
) -> None:
    """Raise UserError unless the index was built from this corpus with these settings and this format, and is
    complete."""
    again = _rebuild(manifest, directory, corpus)
    if manifest.format != FORMAT:
        raise UserError(f"{directory} has index format {manifest.format}, this version reads {FORMAT}", todo=again)
    if manifest.index != index:
        raise UserError(
            f"{directory} was built with settings that differ from retriever.index",
            why="; ".join(_differences(manifest.index, index)),
            todo=f"change the settings, or rebuild: {again}",
        )
    for name, size in manifest.files.items():
        found = directory / name
        if not found.is_file() or found.stat().st_size != size:
            raise UserError(f"{found} is missing or damaged", why=f"expected {size} bytes", todo=again)
    size = open_corpus(corpus).stat().st_size
    if size != manifest.corpus_bytes or (verify_corpus and sha256_file(corpus) != manifest.corpus_sha256):
        raise UserError(
            f"{directory} was built from another corpus than {corpus}",
            why=f"its size was {manifest.corpus_bytes} and is now {size}, or its content changed",
            todo=f"set the right corpus, or rebuild: {again}",
        )


def _differences(built: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in sorted(built.keys() | asked.keys()):
        was, now = built.get(key, "absent"), asked.get(key, "absent")
        if isinstance(was, dict) and isinstance(now, dict):
            lines += _differences(was, now, f"{prefix}{key}.")
        elif was != now:
            lines.append(f"{prefix}{key}: built with {_shown(was)}, configured {_shown(now)}")
    return lines


def _shown(value: Any) -> str:
    """Return the value as text; quote it if it is empty or has blanks, which count in a prefix."""
    quoted = isinstance(value, str) and (not value or any(map(str.isspace, value)))
    return repr(value) if quoted else str(value)
