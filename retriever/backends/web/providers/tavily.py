"""Tavily. Formats: https://docs.tavily.com/documentation/api-reference/endpoint/search, errors:
https://help.tavily.com/articles/8645538886-understanding-http-errors.
"""

from __future__ import annotations

from typing import Any

from retriever.backends.web.config import TavilySettings
from retriever.backends.web.provider import KeyLocation, ProviderHit, ProviderRequest, expect, objects, text


class Tavily:
    """See `Provider`."""

    key_location = KeyLocation("header", "Authorization", "Bearer ")
    quota_words = ("usage limit", "pay-as-you-go limit")

    def __init__(self, settings: TavilySettings) -> None:
        self._settings = settings

    def request(self, query: str, k: int) -> ProviderRequest:
        """See `Provider`."""
        settings = self._settings
        body = {"search_depth": "basic", "include_answer": settings.answers, **settings.params}
        return ProviderRequest(
            settings.base_url, body=body | {"query": query, "max_results": min(k, settings.MAX_HITS)}
        )

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """See `Provider`."""
        expect(reply, "results")
        found = []
        if self._settings.answers and (answer := text(reply, "answer")):
            found.append(ProviderHit("Answer", answer, box=True))
        for item in objects(reply, "results"):
            found.append(ProviderHit(text(item, "title"), text(item, "content"), text(item, "url")))
        return found
