"""Records that are one document each.

contents    `{"id", "contents"}` with `"Title"`, newline, text in `contents`: Search-R1, FlashRAG, pyserini
title_text  `{"id", "title", "text"}`, the title may be missing: BEIR, DPR's table of Wikipedia passages, many dumps
kilt        `text` is a list of paragraphs, the first one often the title: KILT
abstracts   `{"title", "abstract"}`: tables of papers
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.runtime.records import Record
from retriever.corpus.formats.base import CorpusFormat, Document, fields_of, id_of, text_of

_CONTENTS_KEYS = frozenset({"id", "_id", "contents"})


def split_contents(contents: str) -> tuple[str, str]:
    """Return (title, text); the title is the first line if it is in double quotes, else ""."""
    first, newline, rest = contents.partition("\n")
    first = first.strip()
    if newline and len(first) >= 2 and first.startswith('"') and first.endswith('"'):
        return first[1:-1], rest
    return "", contents


def _contents_documents(record: Record) -> Iterator[Document]:
    title, text = split_contents(text_of(record["contents"], "contents"))
    yield Document(id_of(record), title, text, fields_of(record, _CONTENTS_KEYS))


CONTENTS = CorpusFormat(
    '{"id", "contents"}: Search-R1, FlashRAG', lambda record: "contents" in record, _contents_documents
)


_TITLE_TEXT_KEYS = frozenset({"id", "_id", "title", "text", "contents"})
"""Fields already in `contents`: a second copy would double the corpus."""


def _title_text_documents(record: Record) -> Iterator[Document]:
    title = text_of(record.get("title") or record.get("wikipedia_title") or "", "title")
    name = "abstract" if "abstract" in record and "text" not in record else "text"
    text = record[name]
    if isinstance(text, list):
        parts = [text_of(part, "text").strip() for part in text]
        text = "\n".join(part for part in (parts[1:] if parts[:1] == [title] else parts) if part)
    yield Document(id_of(record), title, text_of(text, name), fields_of(record, _TITLE_TEXT_KEYS | {name}))


KILT = CorpusFormat(
    '{"_id", "wikipedia_title", "text": [..]}: KILT',
    lambda record: isinstance(record.get("text"), list),
    _title_text_documents,
)
TITLE_TEXT = CorpusFormat(
    '{"id", "title", "text"}: BEIR, DPR, FlashRAG', lambda record: "text" in record, _title_text_documents
)
ABSTRACTS = CorpusFormat(
    '{"id", "title", "abstract"}: tables of papers',
    lambda record: "title" in record and "abstract" in record,
    _title_text_documents,
)
