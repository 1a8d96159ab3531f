"""Questions of HotpotQA and 2WikiMultihopQA: the paragraphs of every question's `context`.

`context` is a list of [title, sentences] in the original files, and {"title": [..], "sentences": [[..], ..]} in the
copies on the Hugging Face hub; 2Wiki's copy there writes the list as a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from retriever.corpus.formats.base import Document, Format, Record, text_of


def _documents(record: Record) -> Iterator[Document]:
    context: Any = record["context"]
    if isinstance(context, str):
        context = json.loads(context)
    if isinstance(context, dict):
        sentences = context["sentences"] if "sentences" in context else context["content"]
        context = zip(context["title"], sentences, strict=True)
    for title, paragraph in context:
        text = "".join(text_of(sentence, "context") for sentence in paragraph).strip()
        yield Document("", text_of(title, "context"), text)


def _fits(record: Record) -> bool:
    return "context" in record and "question" in record


HOTPOTQA = Format("questions with `context` paragraphs: HotpotQA, 2WikiMultihopQA", _fits, _documents)


# Questions of MuSiQue: `paragraphs` of {"title", "paragraph_text"}.


def _musique_documents(record: Record) -> Iterator[Document]:
    for paragraph in record["paragraphs"]:
        text = text_of(paragraph["paragraph_text"], "paragraph_text").strip()
        yield Document("", text_of(paragraph["title"], "title"), text)


MUSIQUE = Format("questions with `paragraphs`: MuSiQue", lambda record: "paragraphs" in record, _musique_documents)
