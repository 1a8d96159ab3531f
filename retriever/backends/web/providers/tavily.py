"""Tavily. Shapes: https://docs.tavily.com/documentation/api-reference/endpoint/search, errors:
https://help.tavily.com/articles/8645538886-understanding-http-errors.
"""

from __future__ import annotations

from typing import Any

from retriever.backends.web.config import TavilySettings
from retriever.backends.web.provider import Ask, Found, KeyPlace, expect, objects, text


class Tavily:
    """See `Provider`."""

    key_place = KeyPlace("header", "Authorization", "Bearer ")
    quota_words = ("usage limit", "pay-as-you-go limit")

    def __init__(self, settings: TavilySettings) -> None:
        self._settings = settings

    def ask(self, query: str, k: int) -> Ask:
        """See `Provider`."""
        settings = self._settings
        body = {"query": query, "max_results": min(k, settings.MAX_HITS), "search_depth": settings.depth}
        return Ask(settings.base_url, body=body | {"include_answer": settings.answers})

    def read(self, reply: dict[str, Any]) -> list[Found]:
        """See `Provider`."""
        expect(reply, "results")
        found = []
        if self._settings.answers and (answer := text(reply, "answer")):
            found.append(Found("Answer", answer, box=True))
        for item in objects(reply, "results"):
            found.append(Found(text(item, "title"), text(item, "content"), text(item, "url")))
        return found
