"""The search interface: a query in, passages or a named failure out.

| cause | what happened |
|---|---|
| `unreachable` | no connection, or it was lost before the answer was complete |
| `too_many_files` | this process has no free file descriptor for the connection |
| `timeout` | no answer within the timeout of the attempt; for a search: within its deadline |
| `overloaded` | 429 or 503 |
| `http_NNN` | a status other than 200 |
| `not_json` | HTML, not HTTP, or not text |
| `bad_shape` | JSON that does not match the dialect |
| `wrong_count` | more or fewer lists of hits than queries |
| `too_large` | more than 4 MiB; the answer was dropped |
| `failed_WORD` | the server reported the failure of this query as WORD |
| `unavailable` | no retriever was healthy for `outage_wait_s` |
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
NO_FILES = "too_many_files"
KNOWN = (UNREACHABLE, NO_FILES, TIMEOUT, OVERLOADED, NOT_JSON, BAD_SHAPE, WRONG_COUNT, TOO_LARGE, UNAVAILABLE, CLOSED)
"""Causes whose counters exist from the start, as 0. `http_NNN` and `failed_WORD` are added on first use."""
NO_SUCH_PATH = frozenset({"http_404", "http_405", "http_501"})
"""Causes that mean that the server has no such path: a wrong address or dialect and not an outage, unless a proxy
answers so while its server restarts."""
MOST_NAMES = 100
"""Maximum number of causes with a counter. Servers choose some names, and must not flood the metrics."""
_ABOUT_THE_QUERY = frozenset({400, 413, 414, 422})
"""Statuses that a repeated query would get again. Others may come from a proxy while its server restarts."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    passages   best first
    latency_s  seconds, waiting and retries included
    error      "", or a cause: `timeout`, `unreachable`, `overloaded`, `unavailable`, `http_NNN` and the others in the
               table of `rollout_server.search.base`. No passages and no error: nothing was found
    """

    passages: tuple[Passage, ...]
    latency_s: float
    error: str = ""


class Search(Protocol):
    """Search for one query. Failures of the service are returned as `SearchResult.error`, never raised."""

    async def __call__(self, query: str) -> SearchResult:
        """Return the passages for `query`, or the cause of the failure. Called concurrently; never raises."""


class SearchService(Search, Protocol):
    """A search owned by a process: built once, shared by all trajectories, closed at the end."""

    @property
    def outage(self) -> str:
        """Why no query can be answered now; "" if queries can be. Searches wait, and no new work should start."""

    @property
    def backpressure(self) -> bool:
        """Whether enough searches are queued that no new work should start."""

    def report(self, counts: Counter[str], gauges: dict[str, Callable[[], float]]) -> None:
        """Use `counts` for the counters from now on, and add the gauges to `gauges`."""

    async def close(self) -> None:
        """Close connections and end searches in flight. Safe to call twice."""


class LocalSearch:
    """Base of searches without a server: always available, nothing to report or close."""

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
    """Search is disabled: the policy sees that nothing was found."""

    type: Literal["none"] = "none"


class NoSearch(LocalSearch):
    """A search that returns nothing, without an error. Shows how much a policy relies on search results."""

    def __init__(self, settings: NoSearchSettings | None = None) -> None:
        """Take no options."""

    async def __call__(self, query: str) -> SearchResult:
        return SearchResult((), 0.0)


class SearchError(Exception):
    """One attempt at a search failed.

    cause          see the table in the module docstring
    retryable      the same query may succeed at another retriever, or later
    served         the retriever answered, but not correctly; otherwise it was unavailable or overloaded
    refused        the connection was refused: no server listens at the address
    retry_after_s  Retry-After of the server, in seconds
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
    """Return the error for a status other than 200. `retry_after` is the header: seconds, or a date (ignored)."""
    retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
    if status in (429, 503):
        return SearchError(OVERLOADED, served=False, retry_after_s=retry_after_s)
    return SearchError(f"http_{status}", retryable=status not in _ABOUT_THE_QUERY, retry_after_s=retry_after_s)


def error_named_by_server(word: str) -> SearchError:
    """Return the error for a failure reported by the server. The word is untrusted: cut to 32 of [a-z0-9_]."""
    sound = re.sub(r"[^a-z0-9]+", "_", word[:200].lower()).strip("_")[:32]
    return SearchError(f"failed_{sound or 'unnamed'}", retryable=False)


class CauseLabels:
    """The metric label of a cause: its name, or `other` when there are too many."""

    def __init__(self) -> None:
        self._known = set(KNOWN)

    def __call__(self, cause: str) -> str:
        if len(self._known) < MOST_NAMES:
            self._known.add(cause)
        return cause if cause in self._known else "other"
