"""Dead letters, in a file of the run directory (all) and in Redis (bounded); and the learner's event log.

Fields of a dead letter, in both: id (of the entry), seq (0: unknown), reason, detail, from ("learner"; rollout servers
write theirs, `foray/watch/dead_letters.py`), h and b (raw header and body, base64 in the file; at most
FIELD_BYTES of each there, and STREAM_BYTES in Redis). The size is bounded so that foreign writes to the stream cannot
fill the disk.
"""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from learner.delivery.entry import BadEntry
from learner.delivery.store import Fields, RunStore
from protocol import events
from protocol.errors import StateLost, UserError
from protocol.runtime.files import atomic_write
from protocol.runtime.redis.errors import BestEffort, RedisUnavailable

log = logging.getLogger(__name__)

FIELD_BYTES = 1 << 20
STREAM_BYTES = 1 << 16
FILE_BYTES = 64 << 20
"""Size at which the file is rotated, replacing the previous rotated file."""
LEARNER_ID = "0"
"""Rank in metrics and events: a restarted learner replaces its predecessor."""


def rotated(path: Path) -> Path:
    """Return the path of the rotated file of `path`."""
    return path.with_name(f"{path.name}.1")


class DeadLetterStore:
    """Stores unusable entries in `path` and in the dead-letter stream."""

    def __init__(self, store: RunStore, path: Path) -> None:
        self._store, self._path = store, path

    def add(self, id_: bytes, fields: Fields, bad: BadEntry) -> None:
        """Append one dead letter. Never raises: a failed write must not stop the learner."""
        head, body = (fields.get(name, b"")[:FIELD_BYTES] for name in (b"h", b"b"))
        facts: dict[str, str | int] = {"id": id_.decode(), "seq": bad.seq, "reason": bad.reason, "detail": bad.detail}
        facts["from"] = "learner"
        line = facts | {"h": base64.b64encode(head).decode(), "b": base64.b64encode(body).decode()}
        try:
            if self._path.exists() and self._path.stat().st_size >= FILE_BYTES:
                self._path.replace(rotated(self._path))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._store.dead_letter({**facts, "h": head[:STREAM_BYTES], "b": body[:STREAM_BYTES]})
        except (OSError, RedisUnavailable, UserError) as error:
            log.error("could not store the unusable entry %s: %s", id_.decode(), error)


class CrashRecord:
    """Steps in a row with a stream entry in which a learner crashed, in the file `path`.

    The file counts a step before it is trained, so that it is right if the process ends in the middle. It is not
    durable: a power cut is no crash of the learner.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._crashes, self._now = path, Counter[str](), list[str]()
        try:
            if path.exists():
                self._crashes.update({id_: int(n) for id_, n in json.loads(path.read_text()).items()})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("ignoring the record of crashes in %s: %s", path, error)

    def of(self, id_: bytes) -> int:
        """Return the crashes in a row with this entry."""
        return self._crashes[id_.decode()]

    @contextmanager
    def training(self, ids: Sequence[bytes]) -> Iterator[None]:
        """Train a step with these entries inside the block. An exception counts as a crash."""
        self._now.clear()
        self.prepare(ids)
        yield
        for name in map(bytes.decode, ids):
            del self._crashes[name]
            self._now.remove(name)
        self.prepare(())

    def prepare(self, ids: Sequence[bytes]) -> None:
        """Count these entries, too, until they are trained: their batch is built beside the step in progress."""
        self._now += map(bytes.decode, ids)
        try:
            atomic_write(self._path, json.dumps(self._crashes + Counter(self._now)), durable=False)
        except OSError as error:
            log.error("could not record the step in %s: %s", self._path, error)


class EventLog:
    """Writes the learner's lines of the run's history (`protocol/events.py`). Thread-safe.

    Events are informational: a lost one is not an error.
    """

    def __init__(self, store: RunStore) -> None:
        self._store, self._best_effort = store, BestEffort()

    def emit(self, kind: str, text: str) -> None:
        """Write one line. Never raises."""
        fields = events.fields("learner", LEARNER_ID, kind, text)
        try:
            self._best_effort(lambda: self._store.add_event(fields))
        except (RedisUnavailable, StateLost) as error:
            log.info("could not record event %r: %s", kind, error)
