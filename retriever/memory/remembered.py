"""All runs' memories within their bounds, and on disk where that is wanted. Used by one thread."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.search import Passage
from retriever.cache import Answer
from retriever.config_memory import SearchMemorySettings
from retriever.memory.entry import Entry, document_id
from retriever.memory.journal import Journal
from retriever.memory.run_memory import RunMemory
from retriever.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recall:
    """What a run knows about a query.

    reuse  the answer, cut to k, of an earlier search that is near enough to stand for it
    near   answers of the nearest earlier searches, best first, for fusion; empty where there is one to reuse
    """

    reuse: Answer | None
    near: tuple[Answer, ...] = ()


class Remembered:
    """See the module's docstring."""

    def __init__(self, settings: SearchMemorySettings, dim: int, metrics: Metrics, journal: Journal | None) -> None:
        """Takes in what the journal holds."""
        self._settings, self._dim, self._metrics = settings, dim, metrics
        self._max_bytes = int(settings.max_mb * 2**20)
        self._runs: OrderedDict[str, RunMemory] = OrderedDict()
        self._documents: dict[str, list[bytes]] = {}
        """Documents by id, once for every entry that holds one."""
        self._journal = journal
        for run, entry in journal.load() if journal is not None else ():
            self._take_in(run, entry)

    @property
    def num_entries(self) -> int:
        """Over all runs."""
        return sum(map(len, list(self._runs.values())))  # a copy: other threads may ask

    @property
    def num_runs(self) -> int:
        """Runs that are remembered."""
        return len(self._runs)

    @property
    def num_bytes(self) -> int:
        """Over all runs, about."""
        return sum(run.num_bytes for run in self._runs.values())

    def recall(self, run: str, vectors: npt.NDArray[np.float32], k: int) -> list[Recall]:
        """One for each of vectors [n, dim]. What is found counts as used."""
        memory = self._runs.get(run)
        if memory is None:
            return [Recall(None)] * len(vectors)
        self._runs.move_to_end(run)
        return [self._recall(memory, vector, k) for vector in vectors]

    def _recall(self, memory: RunMemory, vector: npt.NDArray[np.float32], k: int) -> Recall:
        settings = self._settings
        if settings.reuse_above is not None:
            # the nearest may have been asked for fewer hits
            for _, entry in memory.nearest(vector, 8, settings.reuse_above):
                if entry.k >= k:
                    memory.touch(entry)
                    return Recall(Answer(entry.answer.documents[:k], entry.answer.scores[:k]))
        near = memory.nearest(vector, settings.fuse, settings.fuse_above)
        for _, entry in near:
            memory.touch(entry)
        return Recall(None, tuple(entry.answer for _, entry in near))

    def remember(self, run: str, entries: Sequence[Entry]) -> None:
        """Take searches in, in this order, and let go of what is then too much."""
        for entry in entries:
            self._take_in(run, entry)
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
            log.exception("the memory can no longer be written: it goes on without the disk")
            self._journal.close()
            self._journal = None

    def find(self, passage_id: str) -> Passage | None:
        """A document that some entry holds."""
        copies = self._documents.get(passage_id)
        return Passage.model_validate_json(copies[-1]) if copies else None

    def close(self) -> None:
        """Let go of the disk."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _take_in(self, run: str, entry: Entry) -> None:
        memory = self._runs.get(run)
        if memory is None:
            memory = self._runs[run] = RunMemory(self._dim, self._settings.max_entries)
        self._runs.move_to_end(run)
        before = len(memory)
        gone = memory.add(entry)
        if len(memory) > before or gone:
            for document in entry.answer.documents:
                self._documents.setdefault(document_id(document), []).append(document)
        for old in gone:
            self._drop_documents(old)
        self._keep_bounds(run)

    def _keep_bounds(self, run: str) -> None:
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

    def _drop_documents(self, entry: Entry) -> None:
        self._metrics.forgotten.inc()
        for document in entry.answer.documents:
            name = document_id(document)
            copies = self._documents[name]
            copies.remove(document)
            if not copies:
                del self._documents[name]
