"""Search APIs: how each is asked and read, all behind `provider.Provider`."""

from __future__ import annotations

from pkgutil import resolve_name

from retriever.backends.web.config import (
    BingSettings,
    BraveSettings,
    GoogleCseSettings,
    OnlineBase,
    SearxngSettings,
    SerpApiSettings,
    SerperSettings,
    TavilySettings,
)
from retriever.backends.web.provider import Provider

REGISTRY: dict[type[OnlineBase], str] = {
    SerpApiSettings: "retriever.backends.web.providers.google:SerpApi",
    SerperSettings: "retriever.backends.web.providers.google:Serper",
    GoogleCseSettings: "retriever.backends.web.providers.google:GoogleCse",
    BraveSettings: "retriever.backends.web.providers.brave:Brave",
    TavilySettings: "retriever.backends.web.providers.tavily:Tavily",
    BingSettings: "retriever.backends.web.providers.bing:Bing",
    SearxngSettings: "retriever.backends.web.providers.searxng:Searxng",
}
"""Settings class to provider class, which is imported when it is needed."""


def build_provider(settings: OnlineBase) -> Provider:
    """Return how the engine of `settings` is asked and read."""
    provider: Provider = resolve_name(REGISTRY[type(settings)])(settings)
    return provider
