"""Is a retriever there? `GET /ready`; where there is no such path `GET /health`; where there is neither, a query."""

from __future__ import annotations

import json

from rollout_server.search.fault import NO_SUCH_PATH, Fault
from rollout_server.search.replica import Proof, Replica
from rollout_server.search.wire import Wire

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
