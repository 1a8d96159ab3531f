"""The journal: every group that was trained, as it came, with the step it was trained in. For replay and for people.

Frames (u32 length, u32 CRC-32, msgpack {step, epoch, batch, h, b}; little-endian) in files `groups-NNNNN.bin`, each
with an index (`learner.journal_index`); each learner start begins a new file. Groups are written after the optimiser
step and before its checkpoint, a whole batch at once, in the order in which they were given to the policy; `batch`
says what else the step was made with (`Conditions`), so that it can be made again bit for bit. Steps that a crash
rolled back are still in there, under their old epoch: `surviving` leaves them out. A frame cut short by a crash ends
its file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from learner.durable import flush, make_folder
from learner.journal_index import FRAME, Place, heal, index_of, places, read_frame, record
from protocol.codec import decode_as, pack
from protocol.header import read_header
from protocol.messages import TrajectoryGroup
from protocol.versions import PolicyVersion, is_orphan

FILE_BYTES = 64 << 20
MIN_FILES = 4
"""A journal of limited size has at least so many files, since it can only be shortened by whole ones."""


@dataclass(frozen=True)
class JournalEntry:
    """A group that was trained in step `step` (the first one is 1) by the learner of `epoch`."""

    step: int
    epoch: int
    group: TrajectoryGroup


@dataclass(frozen=True)
class Conditions:
    """What a batch was made with, beside its groups.

    now_step     step of the policy that was updated, from which lag is counted
    lineage      first version of each learner start until then, from which orphans are told
    temperature  of sampling
    size         groups in the batch that are journalled with it
    mixed        (step, seq) of the groups that were trained before and mixed into it once more
    """

    now_step: int
    lineage: tuple[PolicyVersion, ...]
    temperature: float
    size: int
    mixed: tuple[tuple[int, int], ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Values that msgpack takes."""
        return {
            "now_step": self.now_step,
            "lineage": [list(version) for version in self.lineage],
            "temperature": self.temperature,
            "size": self.size,
            "mixed": [list(pair) for pair in self.mixed],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Conditions:
        """Inverse of `to_plain`."""
        return cls(
            now_step=int(plain["now_step"]),
            lineage=tuple(PolicyVersion(int(epoch), int(step)) for epoch, step in plain["lineage"]),
            temperature=float(plain["temperature"]),
            size=int(plain["size"]),
            mixed=tuple((int(step), int(seq)) for step, seq in plain["mixed"]),
        )


class Journal:
    """Appends to a folder; a file is closed for the next one at FILE_BYTES.

    max_bytes: `prune` keeps the journal below it as far as nothing is dropped that is needed; 0 keeps everything.
    """

    def __init__(self, folder: Path, max_bytes: int = 0) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._file_bytes = min(FILE_BYTES, max_bytes // MIN_FILES) if max_bytes else FILE_BYTES
        self._file: FileIO | None = None
        self._index: FileIO | None = None
        self._healed = False

    def append(
        self, step: int, epoch: int, sealed: Iterable[tuple[bytes, bytes]], conditions: Conditions | None = None
    ) -> None:
        """Adds groups as (header bytes, body bytes). They are with the operating system when this returns.

        Raises OSError; what was written of them then ends its file, and the journal must not be appended to any more.
        conditions: None for groups that were never trained (skipped batches).
        """
        file, index = self._open()
        batch = {} if conditions is None else {"batch": conditions.to_plain()}
        data, records = bytearray(), bytearray()
        path, begin = Path(file.name), file.tell()
        for header, body in sealed:
            raw = pack({"step": step, "epoch": epoch, **batch, "h": header, "b": body})
            at, crc = begin + len(data) + FRAME.size, zlib.crc32(raw)
            data += FRAME.pack(len(raw), crc) + raw
            records += record(Place(path, at, len(raw), crc, epoch, step, read_header(header).seq))
        _write(file, data)
        # Only now: an index never names what may not be there.
        _write(index, records)

    def flush(self) -> None:
        """Flushes the open files to the device; the closed ones and the names of all are there already."""
        for file in (self._file, self._index):
            if file is not None:
                os.fsync(file.fileno())

    def prune(self, needed_from: int) -> None:
        """Drops the oldest files while the journal is larger than it may be; none with a group of step `needed_from`
        or later, and never the one that is being written.
        """
        if not self._max_bytes:
            return
        files = data_files(self._folder)
        sizes = {path: sum(p.stat().st_size for p in (path, index_of(path)) if p.is_file()) for path in files}
        excess = sum(sizes.values()) - self._max_bytes
        for path in files[:-1]:
            if excess <= 0 or max((place.step for place in places(path)), default=0) >= needed_from:
                return
            path.unlink()
            index_of(path).unlink(missing_ok=True)
            excess -= sizes[path]

    def close(self) -> None:
        """Closes the open files. What was not flushed before may be lost: no checkpoint relies on it."""
        for file in (self._file, self._index):
            if file is not None:
                file.close()
        self._file = self._index = None

    def _open(self) -> tuple[FileIO, FileIO]:
        if self._file is not None and self._file.tell() >= self._file_bytes:
            self.flush()  # the next checkpoint relies on this file, and can only reach the one that is open then
            self.close()
        if self._file is None or self._index is None:
            make_folder(self._folder)
            older = data_files(self._folder)
            for path in () if self._healed else older:
                heal(path)
            self._healed = True
            path = self._folder / f"groups-{_number(older[-1]) + 1 if older else 1:05d}.bin"
            # Without buffers: what a full disk refused is not tried again when the files are closed.
            self._file, self._index = FileIO(path, "xb"), FileIO(index_of(path), "wb")
            flush(self._folder)
        return self._file, self._index


def read_journal(folder: Path, *, lineage: Sequence[PolicyVersion] = ()) -> Iterator[JournalEntry]:
    """Every group in order of training. lineage: leave out what a crash rolled back."""
    for place, frame in frames(p for p in all_places(folder) if not rolled_back(p, lineage)):
        yield JournalEntry(place.step, place.epoch, decode_as(TrajectoryGroup, frame["b"]))


def frames(wanted: Iterable[Place]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The frames at these places, each file opened once in a row; damaged ones are left out."""
    with ExitStack() as stack:
        path, file = None, None
        for place in wanted:
            if file is None or place.path != path:
                stack.close()
                path, file = place.path, stack.enter_context(place.path.open("rb"))
            frame = read_frame(file, place)
            if frame is not None:
                yield place, frame


def all_places(folder: Path) -> list[Place]:
    """Every group of the journal in order of training, from the indices."""
    return [place for path in data_files(folder) for place in places(path)]


def rolled_back(place: Place, lineage: Sequence[PolicyVersion]) -> bool:
    """Whether the step of this group did not survive a crash."""
    return is_orphan(PolicyVersion(place.epoch, place.step), lineage)


def data_files(folder: Path) -> list[Path]:
    """The files of the journal, oldest first."""
    return sorted((p for p in folder.glob("groups-*.bin") if p.stem.split("-")[1].isdigit()), key=_number)


def _write(file: FileIO, data: bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _number(path: Path) -> int:
    return int(path.stem.split("-")[1])
