"""`{"id", "title", "text"}`: BEIR, DPR's table of Wikipedia passages, many dumps. The title may be missing."""

from __future__ import annotations

from collections.abc import Iterator

from retriever.formats.base import Document, Format, Record, id_of, text_of


def _documents(record: Record) -> Iterator[Document]:
    yield Document(id_of(record), text_of(record.get("title") or "", "title"), text_of(record["text"], "text"))


TITLE_TEXT = Format('{"id", "title", "text"}: BEIR, DPR, FlashRAG', lambda record: "text" in record, _documents)
