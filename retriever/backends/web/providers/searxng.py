"""SearXNG. Formats: https://docs.searxng.org/dev/search_api.html and https://docs.searxng.org/dev/result_types.

There is no parameter for the number of hits: the instance's first page is cut to k.
"""

from __future__ import annotations

from typing import Any

from retriever.backends.web.config import SearxngSettings
from retriever.backends.web.provider import KeyLocation, ProviderHit, ProviderRequest, expect, objects, text


class Searxng:
    """See `Provider`."""

    key_location = KeyLocation("header", "Authorization", "Bearer ")
    quota_words = ()

    def __init__(self, settings: SearxngSettings) -> None:
        self._settings = settings

    def request(self, query: str, k: int) -> ProviderRequest:
        """See `Provider`. The request is the same for every k, and so is its recording."""
        settings = self._settings
        params = {"language": "en", "categories": "general", "engines": "", **settings.params}
        return ProviderRequest(settings.base_url, params | {"q": query, "format": "json"})

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """See `Provider`."""
        expect(reply, "results")
        found = _boxes(reply) if self._settings.answers else []
        for item in objects(reply, "results"):
            found.append(ProviderHit(text(item, "title"), text(item, "content"), text(item, "url")))
        return found


def _boxes(reply: dict[str, Any]) -> list[ProviderHit]:
    found = []
    answers = reply.get("answers")
    for item in answers if isinstance(answers, list) else []:
        # a text in older instances, an object in newer ones
        answer = item.strip() if isinstance(item, str) else text(item, "answer") if isinstance(item, dict) else ""
        link = text(item, "url") if isinstance(item, dict) else ""
        if answer:
            found.append(ProviderHit("Answer", answer, link, box=True))
    for item in objects(reply, "infoboxes"):
        if content := text(item, "content"):
            link = next((text(url, "url") for url in objects(item, "urls")), "")
            found.append(ProviderHit(text(item, "infobox"), content, link, box=True))
    return found
