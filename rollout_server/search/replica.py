"""One retriever as this client knows it: whether it can be used, why not, and what would prove that it can. Pure.

A replica is put aside when

  * nobody listens at its address, or the look that follows a doubtful failure fails;
  * STRIKES attempts in a row failed in any way but `overloaded`;
  * of the last WINDOW attempts at least MIN_COUNT are known and SHARE of them failed, `overloaded` included.

It comes back by a proof, looked for after growing pauses: that it says it is ready, where it was away; an answered
query, where it was there and did not answer well. One bad query among good ones proves itself guilty: the replica is
back at once.
"""

from __future__ import annotations

import json
from collections import deque
from enum import StrEnum

from rollout_server.search.base import NO_SUCH_PATH, OVERLOADED, TIMEOUT, UNREACHABLE, Fault
from rollout_server.search.limiter import Window
from rollout_server.search.transport import Wire

STRIKES = 3
WINDOW, MIN_COUNT, SHARE = 64, 32, 0.5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Before the first and the later probes of a replica that is aside; each is twice the one before."""


class Proof(StrEnum):
    """What shows that a replica that is aside can be used again."""

    READY = "ready"
    QUERY = "query"


class Verdict(StrEnum):
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
    fingerprint  of its index, "" where it tells none
    """

    def __init__(self, url: str, window: Window) -> None:
        self.url, self.window = url.rstrip("/"), window
        self.up, self.looking = True, False
        self.proof, self.cause = Proof.READY, ""
        self.good_query, self.fingerprint = "", ""
        self._strikes = self._probes = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def succeeded(self, query: str) -> None:
        """It answered `query` as it should."""
        self._strikes = 0
        self._recent.append(True)
        self.good_query = query

    def failed(self, fault: Fault) -> Verdict:
        """What to think of it now. DOUBTFUL: look whether it is there; DOWN: it has been put aside."""
        if not self.up:
            return Verdict.FINE
        self._recent.append(False)
        self._strikes += fault.cause != OVERLOADED
        if fault.refused:
            self.put_aside(fault.cause, Proof.READY)
            return Verdict.DOWN
        known, bad = len(self._recent), self._recent.count(False)
        if self._strikes >= STRIKES or (known >= MIN_COUNT and bad >= SHARE * known):
            self.put_aside(fault.cause, Proof.QUERY)
            return Verdict.DOWN
        gone = fault.cause in (UNREACHABLE, TIMEOUT, OVERLOADED) or fault.cause.startswith("http_5")
        return Verdict.DOUBTFUL if gone and not self.looking else Verdict.FINE

    def put_aside(self, cause: str, proof: Proof) -> None:
        """Ask it nothing until it has proved itself."""
        self.up, self.cause, self.proof, self._probes = False, cause, proof, 0

    def bring_back(self) -> None:
        """It has proved itself: forget the past, and begin with a small window."""
        self.up = True
        self._strikes = 0
        self._recent.clear()
        self.window.restart()

    def next_pause(self) -> float:
        """Seconds until the next probe, to be jittered by the caller."""
        pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._probes, 16))
        self._probes += 1
        return pause


# Is a retriever there? `GET /ready`; where there is no such path `GET /health`; where there is neither, a query.

QUERY = "who wrote the novel emma"
"""Asked of a replica that has not answered anything yet."""


async def probe(wire: Wire, replica: Replica, proof: Proof, *, look_s: float, query_s: float) -> str:
    """One look: "" when the replica has given the proof, else the cause of its failure.

    look_s, query_s  how long it may take to say that it is ready, and to answer a query
    """
    try:
        if proof is Proof.QUERY or not await _says_so(wire, replica.url, look_s):
            await wire.search(replica.url, replica.good_query or QUERY, query_s)
    except Fault as fault:
        return fault.cause
    return ""


async def _says_so(wire: Wire, url: str, timeout_s: float) -> bool:
    """True when it says that it is ready, False when it has no way of saying so; raises Fault when it is not."""
    for path in ("/ready", "/health"):
        try:
            await wire.request("GET", url + path, timeout_s)
        except Fault as fault:
            if fault.cause not in NO_SUCH_PATH:
                raise
        else:
            return True
    return False


async def read_fingerprint(wire: Wire, replica: Replica, timeout_s: float) -> str:
    """What `GET /info` calls the index; "" where it says nothing."""
    try:
        info = json.loads(await wire.request("GET", replica.url + "/info", timeout_s))
    except (Fault, ValueError, RecursionError):
        return ""
    found = info.get("fingerprint") if isinstance(info, dict) else None
    return found[:256] if isinstance(found, str) else ""
