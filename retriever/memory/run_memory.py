"""One run's earlier searches: the vectors in one matrix, the rest in entries; least recently used out first.

Pure: no threads, no files. Cosines are rounded before anything is decided by them, since matrix products differ in the
last bits with the shape of the matrix; of equal ones the older search wins.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retriever.memory.entry import Entry

_DIGITS = 5
_FIRST = 64
"""Rows of the first matrix; it doubles until it has `max_entries`."""


class RunMemory:
    """Entries by the query's text (one a query: a later answer with as many hits or more takes its place)."""

    def __init__(self, dim: int, max_entries: int) -> None:
        self._dim, self._max_entries = dim, max_entries
        self._vectors = np.zeros((min(_FIRST, max_entries), dim), dtype=np.float32)
        self._slots: list[Entry | None] = [None] * len(self._vectors)
        self._order: dict[str, int] = {}
        """Slot of each query, least recently used first."""
        self._ages = np.zeros(len(self._vectors), dtype=np.int64)
        self._clock = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def entries(self) -> list[Entry]:
        """All of them, least recently used first."""
        return [entry for slot in self._order.values() if (entry := self._slots[slot]) is not None]

    def nearest(self, vector: npt.NDArray[np.float32], count: int, above: float) -> list[tuple[float, Entry]]:
        """At most `count` entries with their cosines, best first, none below `above`. Changes nothing."""
        if not self._order or not count:
            return []
        slots = np.fromiter(self._order.values(), dtype=np.int64, count=len(self._order))
        cosines = np.round((self._vectors @ vector)[slots].astype(np.float64), _DIGITS)
        near = np.flatnonzero(cosines >= above)
        order = near[np.lexsort((self._ages[slots[near]], -cosines[near]))][:count]
        found = [(float(cosines[i]), self._slots[slots[i]]) for i in order]
        return [(cosine, entry) for cosine, entry in found if entry is not None]

    def touch(self, entry: Entry) -> None:
        """Note that it was used."""
        if entry.query in self._order:
            self._order[entry.query] = self._order.pop(entry.query)

    def add(self, entry: Entry) -> list[Entry]:
        """Take an entry in, as the most recently used. Returns those that had to go."""
        gone: list[Entry] = []
        known = self._order.pop(entry.query, None)
        if known is not None:
            old = self._slots[known]
            assert old is not None
            if old.k > entry.k:
                self._order[entry.query] = known
                return []
            gone.append(self._clear(known))
            slot = known
        elif len(self._order) < self._max_entries:
            slot = self._free_slot()
        else:
            slot = self._order.pop(next(iter(self._order)))
            gone.append(self._clear(slot))
        self._clock += 1
        self._vectors[slot], self._slots[slot], self._ages[slot] = entry.vector, entry, self._clock
        self._order[entry.query] = slot
        self.num_bytes += entry.num_bytes
        return gone

    def pop_oldest(self) -> Entry:
        """Let go of the least recently used entry. There must be one."""
        return self._clear(self._order.pop(next(iter(self._order))))

    def _clear(self, slot: int) -> Entry:
        entry = self._slots[slot]
        assert entry is not None
        self._slots[slot] = None
        self._vectors[slot] = 0
        self.num_bytes -= entry.num_bytes
        return entry

    def _free_slot(self) -> int:
        if len(self._order) == len(self._slots):
            more = min(self._max_entries, 2 * len(self._slots)) - len(self._slots)
            self._vectors = np.concatenate([self._vectors, np.zeros((more, self._dim), dtype=np.float32)])
            self._ages = np.concatenate([self._ages, np.zeros(more, dtype=np.int64)])
            self._slots += [None] * more
            return len(self._slots) - more
        return self._slots.index(None)


def unit_rows(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 [n, dim] with length 1 each (0 stays 0)."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: npt.NDArray[np.float32] = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    return unit
