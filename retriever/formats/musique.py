"""Questions of MuSiQue: `paragraphs` of {"title", "paragraph_text"}."""

from __future__ import annotations

from collections.abc import Iterator

from retriever.formats.base import Document, Format, Record, text_of


def _documents(record: Record) -> Iterator[Document]:
    for paragraph in record["paragraphs"]:
        text = text_of(paragraph["paragraph_text"], "paragraph_text").strip()
        yield Document("", text_of(paragraph["title"], "title"), text)


MUSIQUE = Format("questions with `paragraphs`: MuSiQue", lambda record: "paragraphs" in record, _documents)
