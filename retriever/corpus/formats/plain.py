"""Records that are one document each.

contents    `{"id", "contents"}` with `"Title"`, newline, text in `contents`: Search-R1, FlashRAG, pyserini
title_text  `{"id", "title", "text"}`, the title may be missing: BEIR, DPR's table of Wikipedia passages, many dumps
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
    title = text_of(record.get("title") or "", "title")
    yield Document(id_of(record), title, text_of(record["text"], "text"), fields_of(record, _TITLE_TEXT_KEYS))


TITLE_TEXT = CorpusFormat(
    '{"id", "title", "text"}: BEIR, DPR, FlashRAG', lambda record: "text" in record, _title_text_documents
)
