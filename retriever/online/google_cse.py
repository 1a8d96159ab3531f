"""Google's Custom Search JSON API. Shapes: https://developers.google.com/custom-search/v1/using_rest and
https://developers.google.com/custom-search/v1/reference/rest/v1/Search.
"""

from __future__ import annotations

from typing import Any

from retriever.config_online import GoogleCseSettings
from retriever.online.provider import Ask, Found, KeyPlace
from retriever.online.reading import expect, objects, text


class GoogleCse:
    """See `Provider`."""

    key_place = KeyPlace("param", "key")
    quota_words = ("dailylimitexceeded", "queries per day")

    def __init__(self, settings: GoogleCseSettings) -> None:
        self._settings = settings

    def ask(self, query: str, k: int) -> Ask:
        """See `Provider`. More than 10 (`num`) would be refused."""
        settings = self._settings
        num = str(min(k, settings.MAX_HITS))
        params = {"cx": settings.cx, "q": query, "num": num, "gl": settings.country, "hl": settings.language}
        return Ask(settings.base_url, params)

    def read(self, reply: dict[str, Any]) -> list[Found]:
        """See `Provider`. `items` is absent where nothing was found."""
        expect(reply, "kind", "items")
        # `snippet` breaks its lines where the result page would
        return [
            Found(text(item, "title"), " ".join(text(item, "snippet").split()), text(item, "link"))
            for item in objects(reply, "items")
        ]
