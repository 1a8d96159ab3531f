"""Search APIs: request and parsing of each provider, behind `provider.Provider`."""

from __future__ import annotations

from pkgutil import resolve_name

from retriever.backends.web.config import REGISTRY, WebBase
from retriever.backends.web.provider import Provider


def build_provider(settings: WebBase) -> Provider:
    """Return the provider of `settings`."""
    provider: Provider = resolve_name(REGISTRY[type(settings)])(settings)
    return provider
