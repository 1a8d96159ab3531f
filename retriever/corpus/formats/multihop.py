"""Questions with their paragraphs: HotpotQA and 2WikiMultihopQA (`context`), MuSiQue (`paragraphs`).

`context` is a list of [title, sentences] in the original files, and {"title": [..], "sentences": [[..], ..]} in the
copies on the Hugging Face hub; 2Wiki's copy there writes the list as a JSON string.
`paragraphs` is a list of {"title", "paragraph_text"}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from protocol.runtime.records import Record
from retriever.corpus.formats.base import CorpusFormat, Document, text_of


def _context_documents(record: Record) -> Iterator[Document]:
    context: Any = record["context"]
    if isinstance(context, str):
        context = json.loads(context)
    if isinstance(context, dict):
        sentences = context["sentences"] if "sentences" in context else context["content"]
        context = zip(context["title"], sentences, strict=True)
    for title, paragraph in context:
        text = "".join(text_of(sentence, "context") for sentence in paragraph).strip()
        yield Document("", text_of(title, "context"), text)


def _has_context(record: Record) -> bool:
    return "context" in record and "question" in record


HOTPOTQA = CorpusFormat(
    "questions with `context` paragraphs: HotpotQA, 2WikiMultihopQA", _has_context, _context_documents
)


def _musique_documents(record: Record) -> Iterator[Document]:
    for paragraph in record["paragraphs"]:
        text = text_of(paragraph["paragraph_text"], "paragraph_text").strip()
        yield Document("", text_of(paragraph["title"], "title"), text)


MUSIQUE = CorpusFormat(
    "questions with `paragraphs`: MuSiQue", lambda record: "paragraphs" in record, _musique_documents
)
