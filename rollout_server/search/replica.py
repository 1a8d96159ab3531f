"""State of one retriever in this client: healthy or ejected, why, and which health check readmits it.

A replica is ejected (Envoy's outlier ejection) when

  * no server listens at its address, or the probe after a doubtful failure fails;
  * STRIKES consecutive attempts failed with another cause than `overloaded`;
  * SHARE of the last WINDOW attempts failed (at least MIN_COUNT of them), `overloaded` included.

It is readmitted after a successful health check: `/ready` if it was unreachable, an answered query if it gave wrong
answers. The pauses between checks grow. If a single bad query caused the failures, the first check readmits it.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from protocol.runtime.http.body import parse_json
from protocol.runtime.timing import backoff_s
from rollout_server.search.base import NO_FILES, NO_SUCH_PATH, OVERLOADED, TIMEOUT, UNREACHABLE, SearchError
from rollout_server.search.batching import QueryBatcher
from rollout_server.search.limiter import GradientLimit
from rollout_server.search.transport import SearchTransport

STRIKES = 3
WINDOW, MIN_COUNT, SHARE = 64, 32, 0.5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""First and longest pause between probes of an ejected replica, in seconds. Each is twice the one before."""

QUERY = "who wrote the novel emma"
"""Query for probes of a replica that has not answered any query yet."""


class HealthCheck(StrEnum):
    """Health check that readmits an ejected replica: `/ready`, or an answered query."""

    READY = "ready"
    QUERY = "query"


class HealthVerdict(StrEnum):
    """What a failed attempt indicates about its replica."""

    FINE = "fine"
    DOUBTFUL = "doubtful"
    DOWN = "down"


class Replica:
    """One retriever.

    up           it gets queries
    proof        health check that readmits it
    cause        why it is ejected, or was the last time
    looking      a probe is in progress
    good_query   a query that it has answered, for probes
    fingerprint  of its index; "" if it reports none
    """

    def __init__(self, url: str, limit: GradientLimit, batcher: QueryBatcher) -> None:
        self.url, self.limit, self.batcher = url.rstrip("/"), limit, batcher
        self.healthy, self.probing = True, False
        self.health_check, self.cause = HealthCheck.READY, ""
        self.good_query, self.fingerprint = "", ""
        self._strikes = self._probes = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._last_error: SearchError | None = None

    def succeeded(self, query: str) -> None:
        """Record that it answered `query`."""
        self._strikes = 0
        self._recent.append(True)
        self.good_query = query

    def failed(self, error: SearchError) -> HealthVerdict:
        """Record a failed attempt. Return DOUBTFUL if it should be probed, DOWN if it was ejected."""
        # the queries of a POST that was lost report the same error: it is one failure of the replica
        repeated, self._last_error = error is self._last_error, error
        if not self.healthy or error.cause == NO_FILES or repeated:
            return HealthVerdict.FINE
        self._recent.append(False)
        self._strikes += error.cause != OVERLOADED
        if error.refused:
            self.eject(error.cause, HealthCheck.READY)
            return HealthVerdict.DOWN
        known, bad = len(self._recent), self._recent.count(False)
        if self._strikes >= STRIKES or (known >= MIN_COUNT and bad >= SHARE * known):
            self.eject(error.cause, HealthCheck.QUERY)
            return HealthVerdict.DOWN
        gone = error.cause in (UNREACHABLE, TIMEOUT, OVERLOADED) or error.cause.startswith("http_5")
        return HealthVerdict.DOUBTFUL if gone and not self.probing else HealthVerdict.FINE

    def eject(self, cause: str, health_check: HealthCheck) -> None:
        """Stop sending it queries until it passes `health_check`."""
        self.healthy, self.cause, self.health_check, self._probes = False, cause, health_check, 0

    def readmit(self) -> None:
        """Send it queries again, with its failures cleared and a small limit."""
        self.healthy = True
        self._strikes = 0
        self._recent.clear()
        self.limit.reset()

    def next_pause(self) -> float:
        """Return the seconds until the next probe; the caller adds jitter."""
        self._probes += 1
        return backoff_s(self._probes, FIRST_PAUSE_S, MAX_PAUSE_S)


async def probe(
    transport: SearchTransport, replica: Replica, health_check: HealthCheck, *, ready_s: float, query_s: float
) -> str:
    """Return "" if the replica passes the health check, else the cause of the failure.

    READY calls `GET /ready`, or `GET /health` if there is no such path, or sends a query if there is neither.
    ready_s, query_s  timeouts of these calls and of the query
    """
    try:
        if health_check is HealthCheck.QUERY or not await _is_ready(transport, replica.url, ready_s):
            await transport.search(replica.url, replica.good_query or QUERY, query_s)
    except SearchError as error:
        return error.cause
    return ""


async def _is_ready(transport: SearchTransport, url: str, timeout_s: float) -> bool:
    """Return True if it reports ready, False if it has neither path. Raises SearchError if it is not ready."""
    for path in ("/ready", "/health"):
        try:
            await transport.request("GET", url + path, timeout_s)
        except SearchError as error:
            if error.cause not in NO_SUCH_PATH:
                raise
        else:
            return True
    return False


async def read_info(transport: SearchTransport, replica: Replica, timeout_s: float) -> str:
    """Return the fingerprint of the index from `GET /info`; "" if there is none. Queries share POSTs to an index."""
    try:
        info = parse_json(await transport.request("GET", replica.url + "/info", timeout_s))
    except (SearchError, ValueError):
        info = None
    info = info if isinstance(info, dict) else {}
    replica.batcher.enabled = info.get("backend") == "index"
    found = info.get("fingerprint")
    return found[:256] if isinstance(found, str) else ""
