"""The seam of the providers: how a query is asked, where the key goes, what is read from the reply. No I/O.

query, k --> Provider.ask --> Ask --> Sender (adds the key, limits, retries) --> JSON --> Provider.read --> [Found]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from protocol.errors import ForayError
from retriever.backends.base import Fault


class Failed(ForayError):
    """One request has no result. `fault` says why; it never holds a key, nor an address with one."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.fault = Fault(cause, detail)


@dataclass(frozen=True)
class Ask:
    """One request without its key: what a recording is found by."""

    url: str
    params: Mapping[str, str] = field(default_factory=dict)
    """Of the address. An empty value is left out."""
    body: Mapping[str, Any] | None = None
    """Sent as JSON by POST. None: GET."""


class Found(NamedTuple):
    """One hit as the provider gave it. `box`: an answer box or a panel rather than a page of the ranking."""

    title: str
    text: str
    url: str = ""
    box: bool = False


class KeyPlace(NamedTuple):
    """Where a request carries the key."""

    where: Literal["header", "param"]
    name: str
    prefix: str = ""


class Provider(Protocol):
    """One search API."""

    @property
    def key_place(self) -> KeyPlace:
        """Where its key goes."""

    @property
    def quota_words(self) -> tuple[str, ...]:
        """Lower-case words in the body of a refusal (4xx) that mean: the account's quota is used up."""

    def ask(self, query: str, k: int) -> Ask:
        """The request for about `k` hits, k at least 1."""

    def read(self, reply: dict[str, Any]) -> list[Found]:
        """Hits in the provider's order, boxes first. None is an answer too. Raises Failed("garbage") where the reply
        is not one of this provider: an answer that was not understood must not pass for an empty one."""


# Small readers for JSON that somebody else wrote: every surprise is Failed("garbage"), never a KeyError.


def expect(reply: dict[str, Any], *names: str) -> None:
    """Raise Failed("garbage") where none of `names` is there: then this is no reply of this provider."""
    if not any(name in reply for name in names):
        raise Failed("garbage", f"none of {', '.join(names)} in the reply")


def objects(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects of the list `name`; [] where it is absent or null."""
    value = holder.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise Failed("garbage", f"{name} is no list")
    return [item for item in value if isinstance(item, dict)]


def inner(holder: dict[str, Any], name: str) -> dict[str, Any]:
    """The object `name`; {} where it is absent or null. Of a list, its first object."""
    value = holder.get(name)
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, dict)), None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Failed("garbage", f"{name} is no object")
    return value


def text(holder: dict[str, Any], *names: str) -> str:
    """The first of `names` that is a text or a number with something in it, as a text; "" without one."""
    for name in names:
        value = holder.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return ""


def facts(holder: dict[str, Any]) -> str:
    """The short texts of an object, one `name: value` a line, without addresses: attributes of a panel."""
    lines = [f"{name}: {value}" for name, value in holder.items() if isinstance(value, str) and "://" not in value]
    return "\n".join(lines)
