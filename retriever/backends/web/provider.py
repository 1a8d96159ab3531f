"""What a search API promises: how a query becomes a request, where the key goes, how a reply is parsed. No I/O.

The functions below read untrusted JSON: every surprise is WebSearchError("garbage"), never a KeyError.

query, k --> Provider.request --> ProviderRequest --> ProviderClient (adds the key, limits, retries)
                                                           |
[ProviderHit] <-- Provider.parse <-- JSON -----------------+
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from protocol.errors import ForayError
from retriever.backends.base import QueryFailure


class WebSearchError(ForayError):
    """A request has no result. `failure` says why; it never holds a key, nor an address with one."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.failure = QueryFailure(cause, detail)


@dataclass(frozen=True)
class ProviderRequest:
    """One request without its key: the key of a recording."""

    url: str
    params: Mapping[str, str] = field(default_factory=dict)
    """Of the address. An empty value is left out."""
    body: Mapping[str, Any] | None = None
    """Sent as JSON by POST. None: GET."""


class ProviderHit(NamedTuple):
    """One hit as the provider gave it. `box`: an answer box or a panel rather than a page of the ranking."""

    title: str
    text: str
    url: str = ""
    box: bool = False


class KeyLocation(NamedTuple):
    """Where a request carries the key."""

    where: Literal["header", "param"]
    name: str
    prefix: str = ""


class Provider(Protocol):
    """One search API."""

    @property
    def key_location(self) -> KeyLocation:
        """Where its key goes."""

    @property
    def quota_words(self) -> tuple[str, ...]:
        """Lower-case words in the body of a 4xx response that mean that the account's quota is used up."""

    def request(self, query: str, k: int) -> ProviderRequest:
        """Return the request for about `k` hits, k at least 1."""

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """Return the hits in the provider's order, boxes first; perhaps none.

        Raises WebSearchError("garbage") if the reply is not one of this provider: a reply that was not understood must
        not pass for an empty one.
        """


def expect(reply: dict[str, Any], *names: str) -> None:
    """Raise WebSearchError("garbage") if none of `names` is there: then this is no reply of this provider."""
    if not any(name in reply for name in names):
        raise WebSearchError("garbage", f"none of {', '.join(names)} in the reply")


def objects(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects of the list `name`; [] if it is absent or null."""
    value = holder.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise WebSearchError("garbage", f"{name} is no list")
    return [item for item in value if isinstance(item, dict)]


def inner(holder: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object `name`; {} if it is absent or null. Of a list, its first object."""
    value = holder.get(name)
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, dict)), None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WebSearchError("garbage", f"{name} is no object")
    return value


def text(holder: dict[str, Any], *names: str) -> str:
    """Return the first of `names` that is a number or a text that is not blank, as a text; "" without one."""
    for name in names:
        value = holder.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return ""


def attribute_lines(holder: dict[str, Any]) -> str:
    """Return the texts of an object, one `name: value` a line, without addresses: attributes of a panel."""
    lines = [f"{name}: {value}" for name, value in holder.items() if isinstance(value, str) and "://" not in value]
    return "\n".join(lines)
