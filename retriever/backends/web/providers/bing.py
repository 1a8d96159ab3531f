"""Services with the API of Bing Web Search v7. Formats:
https://learn.microsoft.com/en-us/bing/search-apis/bing-web-search/search-responses and
https://learn.microsoft.com/en-us/rest/api/cognitiveservices-bingsearch/bing-web-api-v7-reference; a service that
uses it with `Authorization: Bearer`: https://docs.cloudsway.net/Search-Bing-API/api-reference/websearch.
"""

from __future__ import annotations

from typing import Any

from retriever.backends.web.config import BingSettings
from retriever.backends.web.provider import (
    KeyLocation,
    ProviderHit,
    ProviderRequest,
    WebSearchError,
    expect,
    inner,
    objects,
    text,
)


class Bing:
    """See `Provider`."""

    quota_words = ("out of call volume quota", "quota exceeded")

    def __init__(self, settings: BingSettings) -> None:
        self._settings = settings

    @property
    def key_location(self) -> KeyLocation:
        """See `Provider`."""
        name = self._settings.key_header
        return KeyLocation("header", name, "Bearer " if name.lower() == "authorization" else "")

    def request(self, query: str, k: int) -> ProviderRequest:
        """See `Provider`."""
        settings = self._settings
        params = {"q": query, "count": str(min(k, settings.MAX_HITS)), "mkt": settings.market}
        return ProviderRequest(settings.base_url, params | {"textFormat": "Raw", "textDecorations": "false"})

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """See `Provider`. `webPages` is absent if nothing was found."""
        expect(reply, "_type", "webPages", "queryContext")
        if reply.get("_type") == "ErrorResponse":
            raise WebSearchError("garbage", "an ErrorResponse with status 200")
        found = _boxes(reply) if self._settings.answers else []
        for item in objects(inner(reply, "webPages"), "value"):
            found.append(ProviderHit(text(item, "name"), text(item, "snippet"), text(item, "url")))
        return found


def _boxes(reply: dict[str, Any]) -> list[ProviderHit]:
    computed = inner(reply, "computation")
    found = []
    if value := text(computed, "value"):
        found.append(ProviderHit("Answer", f"{text(computed, 'expression')} = {value}", box=True))
    for item in objects(inner(reply, "entities"), "value"):
        if description := text(item, "description"):
            found.append(ProviderHit(text(item, "name"), description, text(item, "url"), box=True))
    return found
