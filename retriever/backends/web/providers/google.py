"""Google's results through three APIs.

SerpApi: https://serpapi.com/search-api, https://serpapi.com/organic-results, https://serpapi.com/search-errors,
https://serpapi.com/direct-answer-box-api, https://serpapi.com/knowledge-graph
Serper: https://serper.dev (playground for the formats);
https://reference.langchain.com/python/langchain-community/utilities/google_serper parses the same formats
Custom Search JSON API: https://developers.google.com/custom-search/v1/using_rest and
https://developers.google.com/custom-search/v1/reference/rest/v1/Search
"""

from __future__ import annotations

from typing import Any

from retriever.backends.web.config import GoogleCseSettings, SerpApiSettings, SerperSettings
from retriever.backends.web.provider import (
    KeyLocation,
    ProviderHit,
    ProviderRequest,
    WebSearchError,
    attribute_lines,
    expect,
    inner,
    objects,
    text,
)

COUNTRY = {"gl": "us", "hl": "en"}
"""Country and language of the results, unless `params` say others."""


class SerpApi:
    """See `Provider`."""

    key_location = KeyLocation("param", "api_key")
    quota_words = ("run out of searches",)

    def __init__(self, settings: SerpApiSettings) -> None:
        self._settings = settings

    def request(self, query: str, k: int) -> ProviderRequest:
        """See `Provider`."""
        settings = self._settings
        num = str(min(k, settings.MAX_HITS))
        params = {"engine": "google", **COUNTRY, **settings.params, "q": query, "num": num}
        return ProviderRequest(settings.base_url, params)

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """See `Provider`. No results are reported as a success with an `error` (search-errors)."""
        expect(reply, "search_metadata", "organic_results")
        if inner(reply, "search_metadata").get("status") == "Error":
            raise WebSearchError("garbage", f"search failed: {text(reply, 'error')[:200]}")
        found = _serpapi_boxes(reply) if self._settings.answers else []
        for item in objects(reply, "organic_results"):
            found.append(ProviderHit(text(item, "title"), text(item, "snippet"), text(item, "link")))
        return found


def _serpapi_boxes(reply: dict[str, Any]) -> list[ProviderHit]:
    box, panel = inner(reply, "answer_box"), inner(reply, "knowledge_graph")
    answer, snippet = text(box, "answer", "result"), text(box, "snippet", "definition")
    found = []
    if answer or snippet:
        both = "\n".join(part for part in (answer, snippet) if part)
        found.append(ProviderHit(text(box, "title") or "Answer", both, text(box, "link"), box=True))
    if description := text(panel, "description"):
        link = text(panel, "website") or text(inner(panel, "source"), "link")
        found.append(ProviderHit(text(panel, "title"), description, link, box=True))
    return found


class GoogleCse:
    """See `Provider`."""

    key_location = KeyLocation("param", "key")
    quota_words = ("dailylimitexceeded", "queries per day")

    def __init__(self, settings: GoogleCseSettings) -> None:
        self._settings = settings

    def request(self, query: str, k: int) -> ProviderRequest:
        """See `Provider`. `num` above 10 would be refused."""
        settings = self._settings
        num = str(min(k, settings.MAX_HITS))
        params = {**COUNTRY, **settings.params, "cx": settings.cx, "q": query, "num": num}
        return ProviderRequest(settings.base_url, params)

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """See `Provider`. `items` is absent if nothing was found."""
        expect(reply, "kind", "items")
        # `snippet` has line breaks as on the result page
        return [
            ProviderHit(text(item, "title"), " ".join(text(item, "snippet").split()), text(item, "link"))
            for item in objects(reply, "items")
        ]


class Serper:
    """See `Provider`."""

    key_location = KeyLocation("header", "X-API-KEY")
    quota_words = ("not enough credits",)

    def __init__(self, settings: SerperSettings) -> None:
        self._settings = settings

    def request(self, query: str, k: int) -> ProviderRequest:
        """See `Provider`."""
        settings = self._settings
        num = min(k, settings.MAX_HITS)
        return ProviderRequest(settings.base_url, body={**COUNTRY, **settings.params, "q": query, "num": num})

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """See `Provider`."""
        expect(reply, "searchParameters", "organic")
        found = _serper_boxes(reply) if self._settings.answers else []
        for item in objects(reply, "organic"):
            found.append(ProviderHit(text(item, "title"), text(item, "snippet"), text(item, "link")))
        return found


def _serper_boxes(reply: dict[str, Any]) -> list[ProviderHit]:
    box, panel = inner(reply, "answerBox"), inner(reply, "knowledgeGraph")
    parts = [part for part in (text(box, "answer"), text(box, "snippet")) if part]
    found = (
        [ProviderHit(text(box, "title") or "Answer", "\n".join(parts), text(box, "link"), box=True)] if parts else []
    )
    parts = [part for part in (text(panel, "description"), attribute_lines(inner(panel, "attributes"))) if part]
    if parts:
        link = text(panel, "descriptionLink", "website")
        found.append(ProviderHit(text(panel, "title"), "\n".join(parts), link, box=True))
    return found
