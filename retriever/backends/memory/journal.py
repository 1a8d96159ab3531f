"""The memory on disk: one append-only file of JSON lines per run, which survives restarts.

    DIRECTORY/FINGERPRINT-SLOT/lock, RUN.jsonl
    {"run": "..", "format": 1}
    {"query": "..", "k": 3, "vector": base64 of float32, "documents": [".."], "scores": [..]}

FINGERPRINT is that of the backend and the encoder: results of another index are never reused. A process locks its slot,
so replicas with the same directory have separate memories, and each finds its own again or a free one. A file contains
the current entries and those evicted since it was last rewritten. A line truncated by a crash is dropped. The time of
last use is not stored: a loaded entry counts as used when it was written.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.runtime.files import atomic_write, entries
from protocol.search import Passage
from retriever.backends.base import QueryResult

log = logging.getLogger(__name__)
FORMAT = 1
SLOTS = 1024
_SLACK = 64
"""A file is rewritten at this many lines beyond twice its entries."""
_OVERHEAD = 600
"""Approximate overhead of CPython per entry with a few documents, in bytes."""


@dataclass(frozen=True, eq=False)
class MemoryEntry:
    """An answered search.

    query   normalised
    k       requested number of hits
    vector  float32 [dim] of length 1, or 0 for a query without words known to the encoder
    answer  the backend's answer, before fusion
    """

    query: str
    k: int
    vector: npt.NDArray[np.float32]
    answer: QueryResult

    @property
    def num_bytes(self) -> int:
        """Return its approximate size in memory."""
        # the vector is stored here and in the run's matrix
        return _OVERHEAD + 4 * len(self.query) + 2 * self.vector.nbytes + sum(map(len, self.answer.documents))


class MemoryJournal:
    """One file of JSON lines per run. Belongs to the memory's thread. Raises OSError."""

    def __init__(self, directory: Path, fingerprint: str, dim: int) -> None:
        """Raises UserError if the directory cannot be written."""
        self._dim = dim
        self._lines: dict[str, int] = {}
        try:
            self.directory, self._lock = _lock_slot(directory, fingerprint)
        except OSError as error:
            raise UserError(
                f"cannot store the search memory in {directory}",
                why=error.strerror or str(error),
                todo="set retriever.memory.directory to a writable directory",
            ) from None

    def load(self) -> Iterator[tuple[str, MemoryEntry]]:
        """Yield (run, entry) of all files, oldest file first, in written order. Repairs torn files and skips invalid
        entries, with a warning."""
        for unfinished in entries(self.directory, ".*.tmp"):  # from a process that was killed while rewriting a file
            unfinished.unlink()
        paths = sorted(entries(self.directory, "*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        for path in paths:
            whole = _without_torn_line(path)
            try:
                run = str(json.loads(whole[0])["run"])
            except (LookupError, ValueError, TypeError, RecursionError):
                log.warning("deleting %s: it does not name its run", path)
                path.unlink()
                continue
            self._lines[run] = len(whole) - 1
            for number, line in enumerate(whole[1:], start=2):
                try:
                    entry = _read(line, self._dim)
                except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
                    log.warning("skipping line %d of %s: %r", number, path, error)
                    continue
                yield run, entry

    def append(self, run: str, entries: Sequence[MemoryEntry]) -> None:
        """Append entries to the run's file."""
        path = self._path(run)
        head = b"" if path.exists() else _head(run)
        with path.open("ab") as file:
            file.write(head + b"".join(map(_line, entries)))
        self._lines[run] = self._lines.get(run, 0) + len(entries)

    def must_rewrite(self, run: str, alive: int) -> bool:
        """Return whether most entries in the run's file are evicted."""
        return self._lines.get(run, 0) > 2 * alive + _SLACK

    def rewrite(self, run: str, entries: Sequence[MemoryEntry]) -> None:
        """Replace the run's file by one with these entries."""
        path = self._path(run)
        atomic_write(path, (_head(run), *map(_line, entries)), durable=False)
        self._lines[run] = len(entries)

    def forget(self, run: str) -> None:
        """Delete the run's file."""
        self._path(run).unlink(missing_ok=True)
        self._lines.pop(run, None)

    def close(self) -> None:
        """Release the slot. Safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, run: str) -> Path:
        return self.directory / f"{hashlib.sha256(run.encode('utf-8', 'replace')).hexdigest()[:32]}.jsonl"


def document_id(document: bytes) -> str:
    """Return the id of a document in its sent form."""
    return str(json.loads(document).get("id", ""))


def _lock_slot(directory: Path, fingerprint: str) -> tuple[Path, int]:
    """Lock the first free slot; return its directory and the lock's file descriptor."""
    for slot in range(SLOTS):
        place = directory / f"{fingerprint}-{slot}"
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:
            os.close(descriptor)
            raise
        return place, descriptor
    raise OSError(f"all {SLOTS} slots are in use by other processes")


def _without_torn_line(path: Path) -> list[bytes]:
    """Return the complete lines of a file and truncate it after the last one, where the next entry is appended."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        log.warning("%s: dropping the last %d bytes, an incomplete line", path, len(content) - end)
        os.truncate(path, end)
    return content[:end].splitlines()


def _head(run: str) -> bytes:
    return json.dumps({"run": run, "format": FORMAT}).encode() + b"\n"


def _line(entry: MemoryEntry) -> bytes:
    record = {
        "query": entry.query,
        "k": entry.k,
        "vector": base64.b64encode(entry.vector.astype("<f4").tobytes()).decode(),
        "documents": [document.decode() for document in entry.answer.documents],
        "scores": entry.answer.scores,
    }
    return json.dumps(record).encode() + b"\n"


def _read(line: bytes, dim: int) -> MemoryEntry:
    record: dict[str, Any] = json.loads(line)
    vector = np.frombuffer(base64.b64decode(record["vector"]), dtype="<f4").astype(np.float32)
    if vector.shape != (dim,):
        raise ValueError(f"a vector of shape {vector.shape}, expected {dim} numbers")
    documents = tuple(document.encode() for document in record["documents"])
    for document in documents:
        Passage.model_validate_json(document)
    query, k, scores = record["query"], record["k"], tuple(map(float, record["scores"]))
    if not isinstance(query, str) or type(k) is not int or len(scores) != len(documents):
        raise ValueError("expected a query, a number of hits and as many scores as documents")
    return MemoryEntry(query, k, vector, QueryResult(documents, scores))
