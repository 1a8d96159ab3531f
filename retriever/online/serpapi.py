"""SerpApi. Shapes: https://serpapi.com/search-api, https://serpapi.com/organic-results,
https://serpapi.com/direct-answer-box-api, https://serpapi.com/knowledge-graph, https://serpapi.com/search-errors.
"""

from __future__ import annotations

from typing import Any

from retriever.config_online import SerpApiSettings
from retriever.online.provider import Ask, Failed, Found, KeyPlace
from retriever.online.reading import expect, inner, objects, text


class SerpApi:
    """See `Provider`."""

    key_place = KeyPlace("param", "api_key")
    quota_words = ("run out of searches",)

    def __init__(self, settings: SerpApiSettings) -> None:
        self._settings = settings

    def ask(self, query: str, k: int) -> Ask:
        """See `Provider`."""
        settings = self._settings
        num = str(min(k, settings.MAX_HITS))
        params = {"engine": settings.engine, "q": query, "num": num, "gl": settings.country, "hl": settings.language}
        return Ask(settings.base_url, params)

    def read(self, reply: dict[str, Any]) -> list[Found]:
        """See `Provider`. An engine without results is a success that has an `error` (search-errors)."""
        expect(reply, "search_metadata", "organic_results")
        if inner(reply, "search_metadata").get("status") == "Error":
            raise Failed("garbage", f"search failed: {text(reply, 'error')[:200]}")
        found = _boxes(reply) if self._settings.answers else []
        for item in objects(reply, "organic_results"):
            found.append(Found(text(item, "title"), text(item, "snippet"), text(item, "link")))
        return found


def _boxes(reply: dict[str, Any]) -> list[Found]:
    box, panel = inner(reply, "answer_box"), inner(reply, "knowledge_graph")
    answer, snippet = text(box, "answer", "result"), text(box, "snippet", "definition")
    found = []
    if answer or snippet:
        both = "\n".join(part for part in (answer, snippet) if part)
        found.append(Found(text(box, "title") or "Answer", both, text(box, "link"), box=True))
    if description := text(panel, "description"):
        link = text(panel, "website") or text(inner(panel, "source"), "link")
        found.append(Found(text(panel, "title"), description, link, box=True))
    return found
