"""One line of a run's history, for people: what happened, where, and when. `Keys.events` holds the newest ones.

Events only inform: they are written after the fact by the process that saw it, and may be lost with Redis. The
counters and the ledger are the record. An entry's time is its id (milliseconds by the clock of Redis).
"""

from __future__ import annotations

MOST = 10_000
"""Entries kept; pass `maxlen=MOST, approximate=True` to XADD."""

TEXT_CHARACTERS = 500


def fields(process: str, process_id: str, kind: str, text: str) -> dict[str, str]:
    """The fields of one entry.

    process, process_id  who saw it, as in MetricsSnapshot: "learner", "rollout", "node", ...; its id
    kind                 one word or two with a hyphen, for filters: "epoch", "state-lost", "dead-letter", ...
    text                 one sentence; longer ones are cut
    """
    return {"process": process, "id": process_id, "kind": kind, "text": text[:TEXT_CHARACTERS]}


def parse(raw: dict[bytes, bytes]) -> dict[str, str]:
    """Inverse of `fields`, for entries that anybody may have written: what is absent is ""."""
    return {name: raw.get(name.encode(), b"").decode("utf-8", "replace") for name in ("process", "id", "kind", "text")}
