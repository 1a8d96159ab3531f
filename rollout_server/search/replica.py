"""One retriever as this client knows it: whether it is healthy, why not, and which probe would readmit it.

A replica is ejected (Envoy's outlier ejection) when

  * no server listens at its address, or the probe that follows a doubtful failure fails;
  * STRIKES attempts in a row failed in any way but `overloaded`;
  * of the last WINDOW attempts at least MIN_COUNT are known and SHARE of them failed, `overloaded` included.

It is readmitted by a health check, made after growing pauses: that it says it is ready, where it was away; an answered
query, where it was there and did not answer well. One bad query among good ones proves itself guilty: the replica is
readmitted at once.
"""

from __future__ import annotations

import json
from collections import deque
from enum import StrEnum

from rollout_server.search.base import NO_SUCH_PATH, OVERLOADED, TIMEOUT, UNREACHABLE, SearchError
from rollout_server.search.limiter import GradientLimit
from rollout_server.search.transport import SearchTransport

STRIKES = 3
WINDOW, MIN_COUNT, SHARE = 64, 32, 0.5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Before the first and the later probes of an ejected replica; each is twice the one before."""

QUERY = "who wrote the novel emma"
"""Probes a replica that has not answered any query yet."""


class HealthCheck(StrEnum):
    """What readmits an ejected replica: `/ready` says so, or a query is answered."""

    READY = "ready"
    QUERY = "query"


class HealthVerdict(StrEnum):
    """What a failed attempt says of its replica."""

    FINE = "fine"
    DOUBTFUL = "doubtful"
    DOWN = "down"


class Replica:
    """One retriever.

    up           queries go there
    proof        what brings it back when it is aside
    cause        why it is aside, or was the last time
    looking      a probe of it is under way
    good_query   one that it has answered, for probes
    fingerprint  of its index, "" where it names none
    """

    def __init__(self, url: str, limit: GradientLimit) -> None:
        self.url, self.limit = url.rstrip("/"), limit
        self.healthy, self.probing = True, False
        self.health_check, self.cause = HealthCheck.READY, ""
        self.good_query, self.fingerprint = "", ""
        self._strikes = self._probes = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def succeeded(self, query: str) -> None:
        """Note that it answered `query`."""
        self._strikes = 0
        self._recent.append(True)
        self.good_query = query

    def failed(self, error: SearchError) -> HealthVerdict:
        """Note a failed attempt and judge. DOUBTFUL: it should be probed; DOWN: it has been ejected."""
        if not self.healthy:
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
        """Send it no queries until it passes `health_check`."""
        self.healthy, self.cause, self.health_check, self._probes = False, cause, health_check, 0

    def readmit(self) -> None:
        """Send it queries again: forget its failures, and begin with a small limit."""
        self.healthy = True
        self._strikes = 0
        self._recent.clear()
        self.limit.reset()

    def next_pause(self) -> float:
        """Seconds until the next probe, to be jittered by the caller."""
        pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._probes, 16))
        self._probes += 1
        return pause


async def probe(
    transport: SearchTransport, replica: Replica, health_check: HealthCheck, *, ready_s: float, query_s: float
) -> str:
    """Return "" when the replica passes the health check, else the cause of its failure.

    READY asks `GET /ready`; where there is no such path `GET /health`; where there is neither, it sends a query.
    ready_s, query_s  time to say that it is ready, and to answer a query
    """
    try:
        if health_check is HealthCheck.QUERY or not await _is_ready(transport, replica.url, ready_s):
            await transport.search(replica.url, replica.good_query or QUERY, query_s)
    except SearchError as error:
        return error.cause
    return ""


async def _is_ready(transport: SearchTransport, url: str, timeout_s: float) -> bool:
    """True when it says that it is ready, False when it has neither path. Raises SearchError when it is not ready."""
    for path in ("/ready", "/health"):
        try:
            await transport.request("GET", url + path, timeout_s)
        except SearchError as error:
            if error.cause not in NO_SUCH_PATH:
                raise
        else:
            return True
    return False


async def read_fingerprint(transport: SearchTransport, replica: Replica, timeout_s: float) -> str:
    """Return what `GET /info` calls the index; "" where it says nothing."""
    try:
        info = json.loads(await transport.request("GET", replica.url + "/info", timeout_s))
    except (SearchError, ValueError, RecursionError):
        return ""
    found = info.get("fingerprint") if isinstance(info, dict) else None
    return found[:256] if isinstance(found, str) else ""
