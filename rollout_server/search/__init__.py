"""Search: every kind by its settings, and the one place where they are built."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

from pydantic import Field

from protocol.settings import Settings
from rollout_server.search.base import NoSearchSettings, SearchService
from rollout_server.search.client import HttpSearchSettings

SearchSettings = Annotated[HttpSearchSettings | NoSearchSettings, Field(discriminator="type")]
DEFAULT_SEARCH = HttpSearchSettings()
REGISTRY: dict[type[Settings], str] = {
    HttpSearchSettings: "client:HttpSearch",
    NoSearchSettings: "base:NoSearch",
}


def build_search(settings: Settings) -> SearchService:
    """Instantiate the search for `settings`; the caller closes it. Nothing is connected before the first query."""
    module, name = REGISTRY[type(settings)].split(":")
    search: SearchService = getattr(import_module(f"{__name__}.{module}"), name)(settings)
    return search
