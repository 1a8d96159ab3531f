"""Search services: their settings and registry."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Annotated

from pydantic import Field

from protocol.settings import Settings
from rollout_server.search.base import NoSearchSettings, SearchService
from rollout_server.search.client import HttpSearchSettings

SearchSettings = Annotated[HttpSearchSettings | NoSearchSettings, Field(discriminator="type")]
DEFAULT_SEARCH = HttpSearchSettings()
REGISTRY: dict[type[Settings], str] = {
    HttpSearchSettings: "rollout_server.search.client:HttpSearch",
    NoSearchSettings: "rollout_server.search.base:NoSearch",
}


def build_search(settings: Settings) -> SearchService:
    """Instantiate the search for `settings`. The caller closes it. Connects at the first query."""
    search: SearchService = resolve_name(REGISTRY[type(settings)])(settings)
    return search
