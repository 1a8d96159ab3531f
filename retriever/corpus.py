"""The corpus: one JSON object a line, read through a memory map by byte offsets, so that no passage lives in memory.

Beside the index lie `offsets.npy` (int64 [n], where each line starts), `id_hashes.npy` (uint64 [n], sorted) and
`id_rows.npy` (int64 [n], the rows in the order of the hashes).
"""

from __future__ import annotations

import hashlib
import json
import mmap
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from protocol.errors import UserError
from protocol.search import Passage

_OFFSETS, _HASHES, _ROWS = "offsets.npy", "id_hashes.npy", "id_rows.npy"
_BOM = b"\xef\xbb\xbf"


def parse_line(line: bytes) -> Passage:
    """One line as a passage; fields beyond `id` and `contents` are ignored. Raises ValueError that says what is wrong.

    Lone surrogates, which JSON can spell and UTF-8 cannot, become `?`.
    """
    record = json.loads(line.removeprefix(_BOM))
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} where an object is needed")
    missing = [key for key in ("id", "contents") if key not in record]
    if missing:
        raise ValueError(f"no {' and no '.join(missing)}; it has {sorted(record)}")
    if not isinstance(record["contents"], str) or not isinstance(record["id"], str | int):
        raise ValueError("`contents` must be a string, `id` a string or an integer")
    return Passage(id=_clean(str(record["id"])), contents=_clean(record["contents"]))


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _id_hash(passage_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(passage_id.encode(), digest_size=8).digest(), "little")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_corpus(path: Path) -> Path:
    """`path` itself, or UserError when it cannot be read."""
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise UserError(
            f"cannot read the corpus {path}",
            why=error.strerror or str(error),
            todo='give retriever.corpus (or --corpus) a file of {"id", "contents"} lines',
        ) from None


class CorpusScan:
    """One pass over a corpus file: yields its texts and remembers what serving needs. 16 bytes of memory a passage."""

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """`progress` is called with (passages, bytes) read so far, after every passage."""
        self._path, self._progress = open_corpus(path), progress
        self._offsets, self._hashes = array("q"), array("Q")
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    @property
    def num_passages(self) -> int:
        """Passages read so far."""
        return len(self._offsets)

    @property
    def sha256(self) -> str:
        """Of the bytes read so far."""
        return self._digest.hexdigest()

    def texts(self) -> Iterator[str]:
        """Contents of every passage, in order; blank lines do not count. UserError names the first bad line."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                start, self.num_bytes = self.num_bytes, self.num_bytes + len(line)
                self._digest.update(line)
                if not line.strip():
                    continue
                try:
                    passage = parse_line(line)
                except ValueError as error:
                    raise UserError(
                        f"line {number} of {self._path} is not a passage",
                        why=str(error),
                        todo='every line must be a JSON object with "id" and "contents"',
                    ) from None
                self._offsets.append(start)
                self._hashes.append(_id_hash(passage.id))
                if self._progress is not None:
                    self._progress(self.num_passages, self.num_bytes)
                yield passage.contents

    def save(self, directory: Path) -> None:
        """Write the three arrays, once `texts` is exhausted."""
        hashes = np.array(self._hashes, dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        np.save(directory / _OFFSETS, np.array(self._offsets, dtype=np.int64))
        np.save(directory / _HASHES, hashes[order])
        np.save(directory / _ROWS, order.astype(np.int64))


class Corpus:
    """Rows and ids to passages. Safe for any number of threads."""

    def __init__(self, path: Path, directory: Path) -> None:
        """`directory` holds what `CorpusScan.save` wrote for exactly this file."""
        with open_corpus(path).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = np.load(directory / _OFFSETS, mmap_mode="r")
        self._hashes = np.load(directory / _HASHES, mmap_mode="r")
        self._rows = np.load(directory / _ROWS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._offsets)

    def passage(self, row: int) -> Passage:
        """The passage of a row in [0, len). IndexError outside: -1 is not the last passage here."""
        if not 0 <= row < len(self._offsets):
            raise IndexError(f"row {row} of a corpus of {len(self._offsets)}")
        start = int(self._offsets[row])
        end = self._map.find(b"\n", start)
        return parse_line(self._map[start : end if end >= 0 else len(self._map)])

    def find(self, passage_id: str) -> Passage | None:
        """The first passage with this id, or None."""
        wanted = np.uint64(_id_hash(_clean(passage_id)))
        place = int(np.searchsorted(self._hashes, wanted))
        while place < len(self._hashes) and self._hashes[place] == wanted:
            passage = self.passage(int(self._rows[place]))
            if passage.id == passage_id:
                return passage
            place += 1
        return None
