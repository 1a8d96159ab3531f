"""`{"id", "contents"}` with `"Title"`, newline, text in `contents`: Search-R1, FlashRAG, pyserini."""

from __future__ import annotations

from collections.abc import Iterator

from retriever.formats.base import Document, Format, Record, id_of, text_of


def split_contents(contents: str) -> tuple[str, str]:
    """(title, text); the title is the first line where that stands in double quotes, and "" otherwise."""
    first, newline, rest = contents.partition("\n")
    first = first.strip()
    if newline and len(first) >= 2 and first.startswith('"') and first.endswith('"'):
        return first[1:-1], rest
    return "", contents


def _documents(record: Record) -> Iterator[Document]:
    yield Document(id_of(record), *split_contents(text_of(record["contents"], "contents")))


CONTENTS = Format('{"id", "contents"}: Search-R1, FlashRAG', lambda record: "contents" in record, _documents)
