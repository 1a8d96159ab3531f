"""A Redis stream and its consumer groups, as Redis 7.0 keeps them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

Id = tuple[int, int]
TOP = 2**64 - 1
LAST = (TOP, TOP)
Fields = dict[bytes, bytes]


@dataclass
class Pending:
    """An entry that was delivered and not acknowledged. at_ms: when, by the clock of Redis."""

    consumer: bytes
    at_ms: int
    deliveries: int


@dataclass
class Group:
    """A consumer group. `pending` is kept in order of ids."""

    last: Id
    pending: dict[Id, Pending] = field(default_factory=dict)
    consumers: set[bytes] = field(default_factory=set)

    def ids(self) -> list[Id]:
        """Pending ids, ascending."""
        return sorted(self.pending)


@dataclass
class Stream:
    """Entries in order of ids."""

    entries: dict[Id, Fields] = field(default_factory=dict)
    last: Id = (0, 0)
    groups: dict[bytes, Group] = field(default_factory=dict)

    def next(self, now_ms: int) -> Id:
        """A clock that runs backwards gives ids that go on from the last one."""
        if now_ms > self.last[0]:
            return (now_ms, 0)
        return (self.last[0], self.last[1] + 1) if self.last[1] < TOP else (self.last[0] + 1, 0)

    def add(self, fields: Fields, id_: Id) -> Id:
        self.entries[id_], self.last = fields, id_
        return id_

    def between(self, low: Id, high: Id, count: int | None = None) -> list[Id]:
        """Ids in [low, high], ascending."""
        ids = list(self.entries)
        return ids[bisect_left(ids, low) : bisect_right(ids, high)][:count]

    def after(self, id_: Id, count: int | None = None) -> list[Id]:
        """Ids above `id_`, ascending."""
        ids = list(self.entries)
        return ids[bisect_right(ids, id_) :][:count]

    def trim(self, lowest: Id) -> int:
        """Removes ids below `lowest`."""
        gone = [id_ for id_ in self.entries if id_ < lowest]
        for id_ in gone:
            del self.entries[id_]
        return len(gone)


def text_of(id_: Id) -> bytes:
    return b"%d-%d" % id_


def id_of(raw: bytes | str | int, *, end: bool = False) -> Id:
    """An id as commands take it: `-`, `+`, `5`, `5-1`."""
    text = raw.decode() if isinstance(raw, bytes) else str(raw)
    if text == "-":
        return (0, 0)
    if text == "+":
        return LAST
    ms, _, number = text.partition("-")
    return (int(ms), int(number) if number else (TOP if end else 0))
