"""Brave Search. Formats: https://api-dashboard.search.brave.com/api-reference/web/search/get and
https://api.search.brave.com/app/documentation/web-search/responses.
"""

from __future__ import annotations

import html
import re
from typing import Any

from retriever.backends.web.config import BraveSettings
from retriever.backends.web.provider import KeyLocation, ProviderHit, ProviderRequest, expect, inner, objects, text

MAX_WORDS, MAX_CHARS = 50, 400
"""Maximum length of a query (`q` in the reference); longer ones are refused, so they are cut."""

_MARKUP = re.compile(r"</?strong>")


class Brave:
    """See `Provider`."""

    key_location = KeyLocation("header", "X-Subscription-Token")
    quota_words = ("quota_limited", "quota exceeded")

    def __init__(self, settings: BraveSettings) -> None:
        self._settings = settings

    def request(self, query: str, k: int) -> ProviderRequest:
        """See `Provider`."""
        settings = self._settings
        short = " ".join(query.split()[:MAX_WORDS])[:MAX_CHARS]
        params = {"country": "us", "search_lang": "en", "text_decorations": "false"}
        params |= {"result_filter": "web,infobox" if settings.answers else "web", **settings.params}
        params |= {"q": short, "count": str(min(k, settings.MAX_HITS))}
        return ProviderRequest(settings.base_url, params)

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """See `Provider`. `web` is absent if nothing was found; `params: {extra_snippets: "true"}` adds excerpts."""
        expect(reply, "type", "web")
        found = _boxes(reply) if self._settings.answers else []
        for item in objects(inner(reply, "web"), "results"):
            extra = item.get("extra_snippets")
            more = [part for part in extra if isinstance(part, str)] if isinstance(extra, list) else []
            body = "\n".join(_plain(part) for part in (text(item, "description"), *more) if part)
            found.append(ProviderHit(_plain(text(item, "title")), body, text(item, "url")))
        return found


def _boxes(reply: dict[str, Any]) -> list[ProviderHit]:
    found = []
    for item in objects(inner(reply, "infobox"), "results"):
        if description := text(item, "long_desc", "description"):
            link = text(item, "website_url", "url")
            found.append(ProviderHit(_plain(text(item, "title", "label")), _plain(description), link, box=True))
    return found


def _plain(marked: str) -> str:
    """Remove highlighting and character references, which occur in spite of `text_decorations`."""
    bare = _MARKUP.sub("", marked)
    try:
        return html.unescape(bare)
    except ValueError:  # a character reference of thousands of digits
        return bare
