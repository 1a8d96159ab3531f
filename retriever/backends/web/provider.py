"""The interface of search APIs: request of a query, location of the key, parsing of replies. No I/O.

The functions below read untrusted JSON: invalid content is WebSearchError("garbage"), never a KeyError.

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
    """A request has no result. `failure` has the cause; it never contains a key or an address with one."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.failure = QueryFailure(cause, detail)


@dataclass(frozen=True)
class ProviderRequest:
    """One request without its API key; it identifies a recording."""

    url: str
    params: Mapping[str, str] = field(default_factory=dict)
    """Query parameters of the address. Empty values are omitted."""
    body: Mapping[str, Any] | None = None
    """Sent as JSON by POST. None: GET."""


class ProviderHit(NamedTuple):
    """One hit as returned by the provider. `box`: an answer box or a panel, not a ranked page."""

    title: str
    text: str
    url: str = ""
    box: bool = False


class KeyLocation(NamedTuple):
    """Location of the key in a request."""

    where: Literal["header", "param"]
    name: str
    prefix: str = ""


class Provider(Protocol):
    """One search API."""

    @property
    def key_location(self) -> KeyLocation:
        """Return the location of its key."""

    @property
    def quota_words(self) -> tuple[str, ...]:
        """Return lower-case words in a 4xx body that mean that the account's quota is exhausted."""

    def request(self, query: str, k: int) -> ProviderRequest:
        """Return the request for about `k` hits, k at least 1."""

    def parse(self, reply: dict[str, Any]) -> list[ProviderHit]:
        """Return the hits in the provider's order, boxes first; possibly none.

        Raises WebSearchError("garbage") if the reply does not match this provider: an unparsable reply must
        not count as an empty one.
        """


def expect(reply: dict[str, Any], *names: str) -> None:
    """Raise WebSearchError("garbage") if none of `names` is present: the reply does not match this provider."""
    if not any(name in reply for name in names):
        raise WebSearchError("garbage", f"none of {', '.join(names)} in the reply")


def objects(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects of the list `name`; [] if absent or null."""
    value = holder.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise WebSearchError("garbage", f"{name} is not a list")
    return [item for item in value if isinstance(item, dict)]


def inner(holder: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object `name`; {} if absent or null. For a list, its first object."""
    value = holder.get(name)
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, dict)), None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WebSearchError("garbage", f"{name} is not an object")
    return value


def text(holder: dict[str, Any], *names: str) -> str:
    """Return the first of `names` that is a number or non-blank text, as text; "" if there is none."""
    for name in names:
        value = holder.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return ""


def attribute_lines(holder: dict[str, Any]) -> str:
    """Return the texts of a panel's attributes, one `name: value` per line, without addresses."""
    lines = [f"{name}: {value}" for name, value in holder.items() if isinstance(value, str) and "://" not in value]
    return "\n".join(lines)
