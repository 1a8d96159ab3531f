"""What a corpus may look like before it is `{"id", "contents"}` lines."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import UserError
from retriever.corpus.formats.base import CorpusFormat, Record
from retriever.corpus.formats.multihop import HOTPOTQA, MUSIQUE
from retriever.corpus.formats.plain import CONTENTS, TITLE_TEXT

FORMATS: dict[str, CorpusFormat] = {
    "contents": CONTENTS,
    "title_text": TITLE_TEXT,
    "hotpotqa": HOTPOTQA,
    "musique": MUSIQUE,
}
"""By name. A new format is one file and one line here; of those that fit a record, the first is taken."""


def detect(record: Record, path: Path) -> str:
    """Return the name of the format of a file's first record. UserError if none fits."""
    for name, form in FORMATS.items():
        if form.fits(record):
            return name
    known = "; ".join(f"{name}: {form.help}" for name, form in FORMATS.items())
    raise UserError(
        f"the format of {path} is not known",
        why=f"its first record has {sorted(record)}",
        todo=f"give --format, or convert it to one of these: {known}",
    )
