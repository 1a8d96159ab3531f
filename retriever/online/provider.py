"""The seam of the providers: how a query is asked, where the key goes, what is read from the reply. No I/O.

query, k --> Provider.ask --> Ask --> Sender (adds the key, limits, retries) --> JSON --> Provider.read --> [Found]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from protocol.errors import ForayError
from retriever.backend import Fault


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
