"""Serper (https://serper.dev, playground for the shapes); reader of the same shapes:
https://reference.langchain.com/python/langchain-community/utilities/google_serper.
"""

from __future__ import annotations

from typing import Any

from retriever.config_online import SerperSettings
from retriever.online.provider import Ask, Found, KeyPlace
from retriever.online.reading import expect, facts, inner, objects, text


class Serper:
    """See `Provider`."""

    key_place = KeyPlace("header", "X-API-KEY")
    quota_words = ("not enough credits",)

    def __init__(self, settings: SerperSettings) -> None:
        self._settings = settings

    def ask(self, query: str, k: int) -> Ask:
        """See `Provider`."""
        settings = self._settings
        num = min(k, settings.MAX_HITS)
        return Ask(settings.base_url, body={"q": query, "num": num, "gl": settings.country, "hl": settings.language})

    def read(self, reply: dict[str, Any]) -> list[Found]:
        """See `Provider`."""
        expect(reply, "searchParameters", "organic")
        found = _boxes(reply) if self._settings.answers else []
        for item in objects(reply, "organic"):
            found.append(Found(text(item, "title"), text(item, "snippet"), text(item, "link")))
        return found


def _boxes(reply: dict[str, Any]) -> list[Found]:
    box, panel = inner(reply, "answerBox"), inner(reply, "knowledgeGraph")
    parts = [part for part in (text(box, "answer"), text(box, "snippet")) if part]
    found = [Found(text(box, "title") or "Answer", "\n".join(parts), text(box, "link"), box=True)] if parts else []
    parts = [part for part in (text(panel, "description"), facts(inner(panel, "attributes"))) if part]
    if parts:
        link = text(panel, "descriptionLink", "website")
        found.append(Found(text(panel, "title"), "\n".join(parts), link, box=True))
    return found
