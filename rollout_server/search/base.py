"""The interface to retrieval: a query in, passages out, and failures that have a name.

| cause | what happened |
|---|---|
| `unreachable` | no connection, or it was cut before the answer was whole |
| `timeout` | no answer within the time of one attempt; for a search: within its deadline |
| `overloaded` | 429 or 503 |
| `http_NNN` | another status than 200 |
| `not_json` | HTML, an answer that is no HTTP, bytes that are no text |
| `bad_shape` | JSON of another form than the dialect's |
| `wrong_count` | more or fewer lists of hits than queries |
| `too_large` | more bytes than `max_bytes`; what came was thrown away |
| `failed_WORD` | the server answered and named this query's failure itself |
| `unavailable` | no retriever could answer for `outage_wait_s` |
| `closed` | this process is stopping |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from protocol.search import Passage
from protocol.settings import Settings

UNAVAILABLE, CLOSED, TIMEOUT, UNREACHABLE, OVERLOADED = "unavailable", "closed", "timeout", "unreachable", "overloaded"
NOT_JSON, BAD_SHAPE, WRONG_COUNT, TOO_LARGE = "not_json", "bad_shape", "wrong_count", "too_large"
KNOWN = (UNREACHABLE, TIMEOUT, OVERLOADED, NOT_JSON, BAD_SHAPE, WRONG_COUNT, TOO_LARGE, UNAVAILABLE, CLOSED)
"""Causes that are shown from the start, as zeros. `http_NNN` and `failed_WORD` come when they come."""
NO_SUCH_PATH = frozenset({"http_404", "http_405", "http_501"})
"""To a search: the server has no such path. That is no outage but a wrong address or dialect, and waiting cures only
what a proxy answers while its server restarts."""
MOST_NAMES = 100
"""Most causes that get a counter. Servers name failures too, and must not fill the metrics."""
_ABOUT_THE_QUERY = frozenset({400, 413, 414, 422})
"""Statuses that the same query would get again. Any other may be a proxy's while its server restarts."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    error  "" or a cause of the table above. No passages and no error: nothing was found
    """

    passages: tuple[Passage, ...]
    latency_s: float
    error: str = ""


class Search(Protocol):
    """Search for one query. Never raises for failures of the service: they are `SearchResult.error`."""

    async def __call__(self, query: str) -> SearchResult: ...


class SearchService(Search, Protocol):
    """A search that a process owns: built once, shared by all rollouts, closed in the end."""

    @property
    def outage(self) -> str:
        """Why no query can be answered now, "" when one can. Searches wait meanwhile, and no new work should begin."""

    @property
    def backpressure(self) -> bool:
        """Whether too many searches are queued for new work to begin."""

    def report(self, counts: Counter[str], gauges: dict[str, Callable[[], float]]) -> None:
        """Count in `counts` from now on, and add the gauges to `gauges`."""

    async def close(self) -> None:
        """Close connections and end searches in flight. Safe to call twice."""


class LocalSearch:
    """Base of searches that call no server: never away, nothing to report or to close."""

    @property
    def outage(self) -> str:
        return ""

    @property
    def backpressure(self) -> bool:
        return False

    def report(self, counts: Counter[str], gauges: dict[str, Callable[[], float]]) -> None:
        """Report nothing."""

    async def close(self) -> None:
        return None


class NoSearchSettings(Settings):
    """Search switched off: the policy sees that nothing was found."""

    type: Literal["none"] = "none"


class NoSearch(LocalSearch):
    """A search that finds nothing, at once and without an error: shows whether a policy answers from what it reads."""

    def __init__(self, settings: NoSearchSettings | None = None) -> None:
        """There are no options."""

    async def __call__(self, query: str) -> SearchResult:
        return SearchResult((), 0.0)


class SearchError(Exception):
    """One attempt at a search failed.

    cause          see the table of the module
    retryable      the same query may do better: at another retriever, or at this one later
    served         the retriever did answer, though not well; else it was away or too busy
    refused        no server listens at the address: no further evidence is needed
    retry_after_s  seconds that the server asked to wait
    """

    def __init__(
        self,
        cause: str,
        *,
        retryable: bool = True,
        served: bool = True,
        refused: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(cause)
        self.cause, self.retryable, self.served = cause, retryable, served
        self.refused, self.retry_after_s = refused, retry_after_s


def error_of_status(status: int, retry_after: str) -> SearchError:
    """What a status other than 200 means; `retry_after` is the header, seconds or (ignored) a date."""
    retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
    if status in (429, 503):
        return SearchError(OVERLOADED, served=False, retry_after_s=retry_after_s)
    return SearchError(f"http_{status}", retryable=status not in _ABOUT_THE_QUERY, retry_after_s=retry_after_s)


def error_named_by_server(word: str) -> SearchError:
    """A failure of one query that the server named. The word is untrusted: [a-z0-9_], at most 32 of it."""
    sound = re.sub(r"[^a-z0-9]+", "_", word[:200].lower()).strip("_")[:32]
    return SearchError(f"failed_{sound or 'unnamed'}", retryable=False)


class CauseLabels:
    """The metric label of a cause: its own name, or `other` when there are too many."""

    def __init__(self) -> None:
        self._known = set(KNOWN)

    def __call__(self, cause: str) -> str:
        if len(self._known) < MOST_NAMES:
            self._known.add(cause)
        return cause if cause in self._known else "other"
