"""The stored searches of all runs, within bounds, optionally on disk. Used by one thread."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.search import Passage
from retriever.backends.base import QueryResult
from retriever.backends.memory.config import SearchMemorySettings
from retriever.backends.memory.journal import MemoryEntry, MemoryJournal, document_id
from retriever.metrics import Metrics

log = logging.getLogger(__name__)
_DIGITS = 5
_FIRST = 64
"""Rows of the first matrix; it doubles until it has `max_entries`."""


class SearchMemory:
    """The memories of all runs; evicts the oldest entries of the least recently used run first."""

    def __init__(
        self, settings: SearchMemorySettings, dim: int, metrics: Metrics, journal: MemoryJournal | None
    ) -> None:
        """Load the journal."""
        self._settings, self._dim, self._metrics = settings, dim, metrics
        self._max_bytes = int(settings.max_mb * 2**20)
        self._runs: OrderedDict[str, RunMemory] = OrderedDict()
        self._documents: dict[str, list[bytes]] = {}
        """Documents by id, one per entry that contains it."""
        self._journal = journal
        for run, entry in journal.load() if journal is not None else ():
            self._add(run, entry)

    @property
    def num_entries(self) -> int:
        """Return the number of entries of all runs."""
        return sum(map(len, list(self._runs.values())))  # a copy: other threads may read

    @property
    def num_runs(self) -> int:
        """Return the number of runs."""
        return len(self._runs)

    @property
    def num_bytes(self) -> int:
        """Return the approximate size of all runs."""
        return sum(run.num_bytes for run in self._runs.values())

    def recall(self, run: str, vectors: npt.NDArray[np.float32], k: int) -> list[MemoryLookup]:
        """Return one lookup for each of vectors [n, dim]. Entries found count as used."""
        memory = self._runs.get(run)
        if memory is None:
            return [MemoryLookup(None)] * len(vectors)
        self._runs.move_to_end(run)
        return [self._recall(memory, vector, k) for vector in vectors]

    def _recall(self, memory: RunMemory, vector: npt.NDArray[np.float32], k: int) -> MemoryLookup:
        settings = self._settings
        if settings.reuse_above is not None:
            # the nearest may have fewer hits
            for _, entry in memory.nearest(vector, 8, settings.reuse_above):
                if entry.k >= k:
                    memory.touch(entry)
                    return MemoryLookup(QueryResult(entry.answer.documents[:k], entry.answer.scores[:k]))
        near = memory.nearest(vector, settings.fuse, settings.fuse_above)
        for _, entry in near:
            memory.touch(entry)
        return MemoryLookup(None, tuple(entry.answer for _, entry in near))

    def remember(self, run: str, entries: Sequence[MemoryEntry]) -> None:
        """Add searches in this order, and evict entries beyond the bounds."""
        for entry in entries:
            self._add(run, entry)
        self._metrics.remembered.inc(len(entries))
        self._metrics.memory_bytes.set(self.num_bytes)
        memory = self._runs.get(run)
        if self._journal is None or memory is None:
            return
        try:
            self._journal.append(run, entries)
            if self._journal.must_rewrite(run, len(memory)):
                self._journal.rewrite(run, memory.entries())
        except OSError:
            log.exception("cannot write the memory to disk: continuing in memory only")
            self._journal.close()
            self._journal = None

    def find(self, passage_id: str) -> Passage | None:
        """Return a document from any entry."""
        copies = self._documents.get(passage_id)
        return Passage.model_validate_json(copies[-1]) if copies else None

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _add(self, run: str, entry: MemoryEntry) -> None:
        memory = self._runs.get(run)
        if memory is None:
            memory = self._runs[run] = RunMemory(self._dim, self._settings.max_entries)
        self._runs.move_to_end(run)
        before = len(memory)
        evicted = memory.add(entry)
        if len(memory) > before or evicted:
            for document in entry.answer.documents:
                self._documents.setdefault(document_id(document), []).append(document)
        for old in evicted:
            self._drop_documents(old)
        self._evict(run)

    def _evict(self, run: str) -> None:
        while len(self._runs) > self._settings.max_runs:
            self._forget_run(next(iter(self._runs)))
        while self.num_bytes > self._max_bytes:
            oldest = next(iter(self._runs))
            if oldest != run:
                self._forget_run(oldest)
            elif self._runs[run]:
                self._drop_documents(self._runs[run].pop_oldest())
            else:
                return

    def _forget_run(self, run: str) -> None:
        for entry in self._runs.pop(run).entries():
            self._drop_documents(entry)
        if self._journal is not None:
            self._journal.forget(run)

    def _drop_documents(self, entry: MemoryEntry) -> None:
        self._metrics.forgotten.inc()
        for document in entry.answer.documents:
            name = document_id(document)
            copies = self._documents[name]
            copies.remove(document)
            if not copies:
                del self._documents[name]


@dataclass(frozen=True)
class MemoryLookup:
    """Result of a lookup in a run's memory.

    reuse  the answer, cut to k, of an earlier search that is similar enough to reuse
    near   answers of the nearest earlier searches, best first, for fusion; empty if there is one to reuse
    """

    reuse: QueryResult | None
    near: tuple[QueryResult, ...] = ()


class RunMemory:
    """One run's earlier searches: vectors in one matrix, the rest in entries; the least recently used is evicted first.
    No I/O.

    One entry per query: a later result with at least as many hits replaces it. Cosines are rounded before comparison,
    because matrix products differ in the last bits with the shape of the matrix; of equal cosines the older search
    wins.

    """

    def __init__(self, dim: int, max_entries: int) -> None:
        self._dim, self._max_entries = dim, max_entries
        self._vectors = np.zeros((min(_FIRST, max_entries), dim), dtype=np.float32)
        self._slots: list[MemoryEntry | None] = [None] * len(self._vectors)
        self._order: dict[str, int] = {}
        """Slot of each query, least recently used first."""
        self._ages = np.zeros(len(self._vectors), dtype=np.int64)
        self._clock = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def entries(self) -> list[MemoryEntry]:
        """Return all entries, least recently used first."""
        return [entry for slot in self._order.values() if (entry := self._slots[slot]) is not None]

    def nearest(self, vector: npt.NDArray[np.float32], count: int, above: float) -> list[tuple[float, MemoryEntry]]:
        """Return at most `count` entries with their cosines, best first, none below `above`. Changes nothing."""
        if not self._order or not count:
            return []
        slots = np.fromiter(self._order.values(), dtype=np.int64, count=len(self._order))
        cosines = np.round((self._vectors @ vector)[slots].astype(np.float64), _DIGITS)
        near = np.flatnonzero(cosines >= above)
        order = near[np.lexsort((self._ages[slots[near]], -cosines[near]))][:count]
        found = [(float(cosines[i]), self._slots[slots[i]]) for i in order]
        return [(cosine, entry) for cosine, entry in found if entry is not None]

    def touch(self, entry: MemoryEntry) -> None:
        """Mark the entry as used."""
        if entry.query in self._order:
            self._order[entry.query] = self._order.pop(entry.query)

    def add(self, entry: MemoryEntry) -> list[MemoryEntry]:
        """Add an entry as the most recently used; return the evicted ones."""
        evicted: list[MemoryEntry] = []
        known = self._order.pop(entry.query, None)
        if known is not None:
            old = self._slots[known]
            assert old is not None
            if old.k > entry.k:
                self._order[entry.query] = known
                return []
            evicted.append(self._clear(known))
            slot = known
        elif len(self._order) < self._max_entries:
            slot = self._free_slot()
        else:
            slot = self._order.pop(next(iter(self._order)))
            evicted.append(self._clear(slot))
        self._clock += 1
        self._vectors[slot], self._slots[slot], self._ages[slot] = entry.vector, entry, self._clock
        self._order[entry.query] = slot
        self.num_bytes += entry.num_bytes
        return evicted

    def pop_oldest(self) -> MemoryEntry:
        """Evict the least recently used entry. There must be one."""
        return self._clear(self._order.pop(next(iter(self._order))))

    def _clear(self, slot: int) -> MemoryEntry:
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
    """Return float32 [n, dim] with length 1 each (0 stays 0)."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: npt.NDArray[np.float32] = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    return unit
