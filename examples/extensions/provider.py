"""An web search provider: the search of a MediaWiki site such as Wikipedia (https://www.mediawiki.org/wiki/API:Search).

Its line in `retriever.backends.web.config.REGISTRY`: `MediaWikiSettings: "examples.extensions.provider:MediaWiki"`
"""

import re
from html import unescape
from typing import Any, Literal

from retriever.backends.web.config import WebBase
from retriever.backends.web.provider import KeyLocation, ProviderHit, ProviderRequest, expect, inner, objects, text


class MediaWikiSettings(WebBase):
    NEEDS_KEY, MAX_HITS = False, 50
    type: Literal["mediawiki"] = "mediawiki"
    base_url: str = "https://en.wikipedia.org/w/api.php"
    key_env: str = ""


class MediaWiki:
    key_location, quota_words = KeyLocation("header", "Authorization", "Bearer "), ("ratelimited",)

    def __init__(self, settings: MediaWikiSettings) -> None:
        self._settings = settings

    def request(self, query: str, k: int) -> ProviderRequest:
        asked = {"action": "query", "list": "search", "format": "json", "srsearch": query, "srlimit": str(min(k, 50))}
        return ProviderRequest(self._settings.base_url, asked)

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        expect(reply, "query")
        site = self._settings.base_url.replace("api.php", "index.php?curid=")
        return [
            ProviderHit(
                text(hit, "title"), unescape(re.sub("<.*?>", "", text(hit, "snippet"))), site + text(hit, "pageid")
            )
            for hit in objects(inner(reply, "query"), "search")
        ]
