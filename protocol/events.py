"""The run's event log, for users: what happened, where and when. `Keys.events` holds the newest entries.

Events are informational: the process that observed one writes it afterwards, and it may be lost with Redis. The
counters and the ledger are authoritative. The time of an entry is its id (milliseconds on the Redis clock).
"""

from __future__ import annotations

MOST = 10_000
"""Maximum number of entries; pass `maxlen=MOST, approximate=True` to XADD."""

TEXT_CHARACTERS = 500

ENGINE_LOST = "engine-lost"
"""Kind of the events in which a node says why it replaces its engine: `foray up` prints them."""


def fields(process: str, process_id: str, kind: str, text: str) -> dict[str, str]:
    """Return the fields of one entry.

    process, process_id  the process that observed it, as in MetricsSnapshot: "learner", "rollout", "node", ...; its id
    kind                 a word, or two joined by a hyphen, for filters: "epoch", "state-lost", "dead-letter", ...
    text                 one sentence; truncated if too long
    """
    return {"process": process, "id": process_id, "kind": kind, "text": text[:TEXT_CHARACTERS]}


def parse(raw: dict[bytes, bytes]) -> dict[str, str]:
    """Decode an entry, the inverse of `fields`. Any client may have written it: missing fields become ""."""
    return {name: raw.get(name.encode(), b"").decode("utf-8", "replace") for name in ("process", "id", "kind", "text")}
