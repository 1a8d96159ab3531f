"""Counters, requests, events and dead letters in Redis, beside the delivery itself.

A census costs O(bytes of the unread entries + ids pending), because Redis cannot read one field of an entry without the
others. No call reads more than 1 MiB and one entry (`functions.lua`: PAGE_BYTES) or lists more than PAGE ids, however
much waits: other clients are served between the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis
from redis.exceptions import NoPermissionError

from protocol import events, functions
from protocol.codec import number_of
from protocol.keys import TRAJ_GROUP, Keys
from protocol.runtime.redis.errors import translate_errors

DEAD_LETTERS = 1000
REQUESTS = 100
"""Maximum number of user requests processed per second."""
PAGE = 1000
"""Maximum number of ids per call of a census."""
LIFE, COMMIT = "life", "commit"
"""Fields of `Keys.tokens` that the learner writes: a name for the hash's lifetime; its last commit."""


@dataclass(frozen=True)
class Census:
    """Snapshot of the trajectory stream: counters and entries of one moment.

    published, rejected  tokens that this Redis has counted since its hash was empty
    life, commit         values written by the learner
    last                 newest entry ever added
    pending              entries delivered to a learner and not acknowledged
    unread               entry -> tokens, for entries not yet delivered
    """

    published: int
    rejected: int
    life: str
    commit: str
    last: bytes
    pending: frozenset[bytes]
    unread: Mapping[bytes, int]


class AccountingStore:
    """Part of `RunStore`, which provides the client and the keys."""

    keys: Keys
    _db: redis.Redis

    def census(self) -> Census:
        """Return the current state of the entries, and Redis' counters.

        Only the thread that acknowledges may call it: no entry of that moment disappears before the last page is read.
        """
        traj, unread = self.keys.traj, dict[bytes, int]()
        with translate_errors(traj):
            flat, last, delivered = cast(Any, self._db.fcall(functions.CENSUS, 2, traj, self.keys.tokens))
            counts, after = dict(zip(flat[::2], flat[1::2], strict=True)), delivered
            while page := cast(list[bytes], self._db.fcall(functions.UNREAD, 1, traj, after, last)):
                unread.update(zip(page[::2], map(number_of, page[1::2]), strict=True))
                after = page[-2]
        return Census(
            published=number_of(counts.get(b"published", b"")),
            rejected=number_of(counts.get(b"rejected", b"")),
            life=counts.get(LIFE.encode(), b"").decode("ascii", "replace"),
            commit=counts.get(COMMIT.encode(), b"").decode("ascii", "replace"),
            last=last,
            pending=frozenset(self._pending(delivered)),
            unread=unread,
        )

    def _pending(self, delivered: bytes) -> Iterator[bytes]:
        """Yield the ids up to `delivered` that are not acknowledged."""
        after = b"-"
        while True:
            with translate_errors(self.keys.traj):
                page: Any = self._db.xpending_range(self.keys.traj, TRAJ_GROUP, after, delivered, PAGE)
            yield from (entry["message_id"] for entry in page)
            if len(page) < PAGE:
                return
            after = b"(" + page[-1]["message_id"]

    def tokens_of(self, ids: Iterable[bytes]) -> int:
        """Return the tokens of these entries, as written by the publishing function."""
        wanted, total = list(ids), 0
        while wanted:
            with translate_errors():
                page: Any = self._db.fcall(functions.TOKENS_OF, 1, self.keys.traj, *cast(list[str], wanted[:PAGE]))
            total += sum(map(number_of, page))
            del wanted[: len(page)]
        return total

    def begin_life(self, name: str) -> str:
        """Name the lifetime of the token hash unless it has a name; return the current name."""
        with translate_errors(), self._db.pipeline(transaction=True) as pipe:
            pipe.hsetnx(self.keys.tokens, LIFE, name)
            pipe.hget(self.keys.tokens, LIFE)
            return str(pipe.execute()[1].decode("ascii", "replace"))

    def committed(self, name: str) -> None:
        """Record the last checkpoint."""
        with translate_errors(self.keys.tokens):
            self._db.hset(self.keys.tokens, COMMIT, name)

    def server(self) -> str:
        """Return an id that changes with the Redis process; "" without permission."""
        try:
            with translate_errors():
                try:
                    return str(self._db.info("server").get("run_id", ""))
                except NoPermissionError:
                    return ""
        except redis.ResponseError:
            return ""

    def refusals(self) -> int:
        """Return the number of commands that Redis refused for lack of memory; 0 without permission."""
        with translate_errors():
            try:
                stats = self._db.info("errorstats")
            except NoPermissionError:
                return 0
        return int(stats.get("errorstat_OOM", {}).get("count", 0))

    def trim_diagnostics(self) -> int:
        """Remove the older half of the diagnostic entries in Redis; return their number."""
        with translate_errors(), self._db.pipeline(transaction=False) as pipe:
            for stream in (self.keys.dlq, self.keys.events):
                pipe.xlen(stream)
            lengths: list[int] = pipe.execute()
            for stream, length in zip((self.keys.dlq, self.keys.events), lengths, strict=True):
                pipe.xtrim(stream, maxlen=length // 2, approximate=False)
            return sum(pipe.execute())

    def rejected(self) -> tuple[int, str]:
        """Return the tokens of rejected attempts that this Redis has counted, and the counter's lifetime (`life`)."""
        with translate_errors(self.keys.tokens):
            counted, life = cast(list[bytes | None], self._db.hmget(self.keys.tokens, ["rejected", LIFE]))
        return number_of(counted or b""), (life or b"").decode("ascii", "replace")

    def requests(self) -> list[bytes]:
        """Return the seqs requested for a retry, as written; at most REQUESTS."""
        with translate_errors(self.keys.requeue):
            return cast(list[bytes], self._db.srandmember(self.keys.requeue, REQUESTS))

    def drop_requests(self, seqs: Iterable[int | bytes]) -> None:
        """Remove these requests."""
        wanted = list(seqs)
        if wanted:
            with translate_errors(self.keys.requeue):
                self._db.srem(self.keys.requeue, *cast(tuple[str, ...], tuple(wanted)))

    def add_event(self, fields: Mapping[str, str]) -> None:
        """Add one line to the run's event log."""
        with translate_errors(self.keys.events):
            self._db.xadd(self.keys.events, cast(Any, dict(fields)), maxlen=events.MOST, approximate=True)

    def dead_letter(self, fields: dict[str, str | int | bytes]) -> None:
        """Add a dead letter to the bounded stream; the file in the run directory is the full record."""
        with translate_errors(self.keys.dlq):
            self._db.xadd(self.keys.dlq, cast(Any, fields), maxlen=DEAD_LETTERS, approximate=True)
