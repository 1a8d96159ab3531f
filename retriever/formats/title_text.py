"""`{"id", "title", "text"}`: BEIR, DPR's table of Wikipedia passages, many dumps. The title may be missing."""

from __future__ import annotations

from collections.abc import Iterator

from retriever.formats.base import Document, Format, Record, fields_of, id_of, text_of

_NAMED = frozenset({"id", "_id", "title", "text", "contents"})
"""`contents` holds title and text: a second copy would double the corpus."""


def _documents(record: Record) -> Iterator[Document]:
    title = text_of(record.get("title") or "", "title")
    yield Document(id_of(record), title, text_of(record["text"], "text"), fields_of(record, _NAMED))


TITLE_TEXT = Format('{"id", "title", "text"}: BEIR, DPR, FlashRAG', lambda record: "text" in record, _documents)
