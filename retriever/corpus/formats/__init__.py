"""Source formats of a corpus, converted to `{"id", "contents"}` lines."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.records import Record
from retriever.corpus.formats.base import CorpusFormat
from retriever.corpus.formats.multihop import HOTPOTQA, MUSIQUE
from retriever.corpus.formats.plain import ABSTRACTS, CONTENTS, KILT, TITLE_TEXT

FORMATS: dict[str, CorpusFormat] = {
    "contents": CONTENTS,
    "kilt": KILT,
    "title_text": TITLE_TEXT,
    "abstracts": ABSTRACTS,
    "hotpotqa": HOTPOTQA,
    "musique": MUSIQUE,
}
"""Formats by name. To add one, write one file and one line here; the first that matches a record is used."""


def detect(record: Record, path: Path) -> str:
    """Return the name of the format of a file's first record. Raises UserError if none matches."""
    for name, form in FORMATS.items():
        if form.fits(record):
            return name
    known = "; ".join(f"{name}: {form.help}" for name, form in FORMATS.items())
    raise UserError(
        f"unknown corpus format: {path}",
        why=f"its first record has {sorted(record)}",
        todo=f"set --format, or convert it to one of these: {known}",
    )
