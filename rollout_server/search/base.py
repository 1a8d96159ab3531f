"""The seam to retrieval: a query in, passages out, and failures that have a name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from protocol.search import Passage
from protocol.settings import Settings


@dataclass(frozen=True)
class SearchResult:
    """What a search brought.

    error  "" or a short word, see `rollout_server.search.fault`. No passages and no error: nothing was found
    """

    passages: tuple[Passage, ...]
    latency_s: float
    error: str = ""


class Search(Protocol):
    """Searches for one query; never raises for the service's faults: they are `SearchResult.error`."""

    async def __call__(self, query: str) -> SearchResult: ...


class SearchService(Search, Protocol):
    """A search that a process owns: it is built once, shared by all rollouts, and closed in the end."""

    @property
    def outage(self) -> str:
        """Why no query can be answered now, "" when one can. Searches wait meanwhile; new work is better not begun."""

    @property
    def congested(self) -> bool:
        """Whether so many searches stand in line that new work is better not begun."""

    def report(self, counts: Counter[str], gauges: dict[str, Callable[[], float]]) -> None:
        """From now on count in `counts`, and have what can be read at any moment in `gauges`."""

    async def close(self) -> None:
        """Let go of connections and of searches in flight. Safe to call twice."""


class Ungoverned:
    """What a search owes besides searching when it asks nobody: it is never away, and holds nothing."""

    @property
    def outage(self) -> str:
        return ""

    @property
    def congested(self) -> bool:
        return False

    def report(self, counts: Counter[str], gauges: dict[str, Callable[[], float]]) -> None:
        """It has nothing to report."""

    async def close(self) -> None:
        return None


class NoSearchSettings(Settings):
    """Search switched off: the policy is told that nothing was found."""

    type: Literal["none"] = "none"


class NoSearch(Ungoverned):
    """A search that finds nothing, at once and without an error: shows whether a policy answers from what it reads."""

    def __init__(self, settings: NoSearchSettings | None = None) -> None:
        """There are no options."""

    async def __call__(self, query: str) -> SearchResult:
        return SearchResult((), 0.0)


# How a request to a retriever fails, by name. Pure.
#
# | cause | what happened |
# |---|---|
# | `unreachable` | no connection, or it was cut before the answer was whole |
# | `timeout` | no answer within the time of one attempt; for a search: within its deadline |
# | `overloaded` | 429 or 503 |
# | `http_NNN` | another status than 200 |
# | `not_json` | HTML, an answer that is no HTTP, bytes that are no text |
# | `bad_shape` | JSON of another form than the dialect's |
# | `wrong_count` | more or fewer lists of hits than queries |
# | `too_large` | more bytes than `max_bytes`; what came was thrown away |
# | `failed_WORD` | the server answered and named this query's failure itself |
# | `unavailable` | no retriever could answer for `outage_wait_s` |
# | `closed` | this process is stopping |

UNAVAILABLE, CLOSED, TIMEOUT, UNREACHABLE, OVERLOADED = "unavailable", "closed", "timeout", "unreachable", "overloaded"
NOT_JSON, BAD_SHAPE, WRONG_COUNT, TOO_LARGE = "not_json", "bad_shape", "wrong_count", "too_large"
KNOWN = (UNREACHABLE, TIMEOUT, OVERLOADED, NOT_JSON, BAD_SHAPE, WRONG_COUNT, TOO_LARGE, UNAVAILABLE, CLOSED)
"""Causes that are shown from the start, as zeros. `http_NNN` and `failed_WORD` come when they come."""

NO_SUCH_PATH = frozenset({"http_404", "http_405", "http_501"})
"""To a search: the server has no such path. That is no outage but a wrong address or dialect, and waiting cures only
what a proxy answers while its server restarts."""

MOST_NAMES = 100
"""Causes with a counter of their own. Servers name failures too, and a stranger must not fill the metrics."""

_ABOUT_THE_QUERY = frozenset({400, 413, 414, 422})
"""Statuses that the same query would get again. Any other may be a proxy's while its server restarts."""


class Fault(Exception):
    """One attempt failed.

    cause    see the module
    again    the same query may do better: at another retriever, or at this one later
    served   the retriever did answer, though not well; else it was away or too busy
    refused  nobody listens at the address: no further evidence is needed
    wait_s   the server asked not to be asked again for so long
    """

    def __init__(
        self, cause: str, *, again: bool = True, served: bool = True, refused: bool = False, wait_s: float = 0.0
    ) -> None:
        super().__init__(cause)
        self.cause, self.again, self.served, self.refused, self.wait_s = cause, again, served, refused, wait_s


def status_fault(status: int, retry_after: str) -> Fault:
    """What a status other than 200 means; `retry_after` is the header, seconds or (ignored) a date."""
    wait_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
    if status in (429, 503):
        return Fault(OVERLOADED, served=False, wait_s=wait_s)
    return Fault(f"http_{status}", again=status not in _ABOUT_THE_QUERY, wait_s=wait_s)


def named_by_server(word: str) -> Fault:
    """A failure of one query that the server named. The word is a stranger's: [a-z0-9_], at most 32 of it."""
    sound = re.sub(r"[^a-z0-9]+", "_", word[:200].lower()).strip("_")[:32]
    return Fault(f"failed_{sound or 'unnamed'}", again=False)


class Names:
    """What a cause is counted under: its own name, or `other` when there are too many."""

    def __init__(self) -> None:
        self._known = set(KNOWN)

    def __call__(self, cause: str) -> str:
        if len(self._known) < MOST_NAMES:
            self._known.add(cause)
        return cause if cause in self._known else "other"
