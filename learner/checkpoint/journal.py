"""The journal: every trained group as received, with its step. Used for replay and for inspection.

Frames (u32 length, u32 CRC-32, msgpack {step, epoch, batch, h, b}; little-endian) in files `groups-NNNNN.bin`, each
with an index, `groups-NNNNN.idx`; each learner start begins a new file. Groups are written after the optimiser step and
before its checkpoint, a whole batch at a time, in training order. `batch` records the other inputs of the step
(`BatchConditions`), so that it can be repeated bit for bit. Steps that a crash rolled back stay in the journal under
their old epoch; `surviving` leaves them out. A frame truncated by a crash ends its file.

The index locates every group without reading the others: one record of fixed size per frame, with its own checksum.
Missing, truncated or damaged records are rebuilt from the data. Readers do that in memory; only the learner that
begins a new file of the journal rewrites the older indices.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from isal import isal_zlib

from protocol.codec import MAX_BYTES, decode_as, pack, unpack
from protocol.errors import ProtocolError
from protocol.header import read_header
from protocol.messages import TrajectoryGroup
from protocol.runtime.files import atomic_write, durable_mkdir, entries, fsync_path
from protocol.versions import PolicyVersion, is_orphan

log = logging.getLogger(__name__)

FILE_BYTES = 64 << 20
MIN_FILES = 4
"""A size-limited journal has at least this many files, because only whole files can be dropped."""

FRAME = struct.Struct("<II")
"""Head of a data frame: length and CRC-32 of the content."""
_RECORD = struct.Struct("<QIIIQQ")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size


class FrameLocation(NamedTuple):
    """Location of one group: file, offset, length and CRC-32 of the frame's content, and the group's identity."""

    path: Path
    offset: int
    length: int
    crc: int
    epoch: int
    step: int
    seq: int

    @property
    def end(self) -> int:
        """Return the offset of the first byte after the frame."""
        return self.offset + self.length


def index_of(data: Path) -> Path:
    """Return the index of a file of the journal."""
    return data.with_suffix(".idx")


def index_record(location: FrameLocation) -> bytes:
    """Return the location in the index's format."""
    raw = _RECORD.pack(location.offset, location.length, location.crc, location.epoch, location.step, location.seq)
    return raw + _CHECK.pack(isal_zlib.crc32(raw))


def locations(data: Path) -> list[FrameLocation]:
    """Return the location of every whole frame of the file, in order, without writing."""
    indexed = _indexed(data)
    return [*indexed, *_scan(data, indexed[-1].end if indexed else 0)]


def rebuild_index(data: Path) -> None:
    """Rewrite the index unless it matches the data exactly."""
    wanted = b"".join(index_record(location) for location in locations(data))
    index = index_of(data)
    if index.is_file() and index.read_bytes() == wanted:
        return
    log.warning("rebuilding index %s from the data", index)
    atomic_write(index, wanted, durable=True)


def read_frame(file: BinaryIO, location: FrameLocation) -> dict[str, Any] | None:
    """Return the frame at `location` of the open file, unpacked; None if it is damaged."""
    file.seek(location.offset)
    raw = file.read(location.length)
    if len(raw) != location.length or isal_zlib.crc32(raw) != location.crc:
        log.warning("%s: the group of seq %d at byte %d is damaged", location.path, location.seq, location.offset)
        return None
    frame: dict[str, Any] = unpack(raw)
    return frame


def _indexed(data: Path) -> list[FrameLocation]:
    """Return the valid records of the index for which the data exists."""
    try:
        raw = index_of(data).read_bytes()
    except FileNotFoundError:
        return []
    found: list[FrameLocation] = []
    end, size = 0, data.stat().st_size
    for at in range(0, len(raw) - RECORD_BYTES + 1, RECORD_BYTES):
        body = raw[at : at + _RECORD.size]
        location = FrameLocation(data, *_RECORD.unpack(body))
        (check,) = _CHECK.unpack_from(raw, at + _RECORD.size)
        if isal_zlib.crc32(body) != check or location.offset != end + FRAME.size or location.end > size:
            break
        found.append(location)
        end = location.end
    return found


def _scan(data: Path, start: int) -> Iterator[FrameLocation]:
    """Yield frames from byte `start` on. A damaged or truncated frame ends the file: the position of the next one is
    unknown."""
    with data.open("rb") as file:
        file.seek(start)
        while head := file.read(FRAME.size):
            offset = file.tell()
            length, crc = FRAME.unpack(head) if len(head) == FRAME.size else (0, 0)
            raw = file.read(length) if 0 < length <= 2 * MAX_BYTES else b""
            if not raw or len(raw) != length or isal_zlib.crc32(raw) != crc:
                log.warning("%s: the frame before byte %d is damaged; skipping the rest of the file", data, file.tell())
                return
            try:
                frame = unpack(raw)
                location = FrameLocation(
                    data, offset, length, crc, frame["epoch"], frame["step"], read_header(frame["h"]).seq
                )
                index_record(location)
            except (ProtocolError, KeyError, TypeError, struct.error):
                log.warning(
                    "%s: the frame before byte %d is not a journal frame; skipping the rest of the file",
                    data,
                    file.tell(),
                )
                return
            yield location


@dataclass(frozen=True)
class JournalEntry:
    """A group that was trained in step `step` (the first one is 1) by the learner of `epoch`."""

    step: int
    epoch: int
    group: TrajectoryGroup


@dataclass(frozen=True)
class BatchConditions:
    """Inputs of a step other than its groups.

    now_step     step of the policy that was updated; lag is relative to it
    lineage      first version of each learner start so far; identifies orphans
    temperature  of sampling
    size         number of groups journalled with this batch
    mixed        (step, seq) of earlier groups that were mixed into the batch again
    """

    now_step: int
    lineage: tuple[PolicyVersion, ...]
    temperature: float
    size: int
    mixed: tuple[tuple[int, int], ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return values that msgpack can encode."""
        return {
            "now_step": self.now_step,
            "lineage": [list(version) for version in self.lineage],
            "temperature": self.temperature,
            "size": self.size,
            "mixed": [list(pair) for pair in self.mixed],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> BatchConditions:
        """Inverse of `to_plain`."""
        return cls(
            now_step=int(plain["now_step"]),
            lineage=tuple(PolicyVersion(int(epoch), int(step)) for epoch, step in plain["lineage"]),
            temperature=float(plain["temperature"]),
            size=int(plain["size"]),
            mixed=tuple((int(step), int(seq)) for step, seq in plain["mixed"]),
        )


class GroupJournal:
    """Appends to a folder and begins a new file at FILE_BYTES.

    max_bytes: `prune` keeps the journal below this size, but never drops needed groups; 0 keeps everything.
    """

    def __init__(self, folder: Path, max_bytes: int = 0) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._file_bytes = min(FILE_BYTES, max_bytes // MIN_FILES) if max_bytes else FILE_BYTES
        self._file: FileIO | None = None
        self._index: FileIO | None = None
        self._healed = False

    def append(
        self, step: int, epoch: int, sealed: Iterable[tuple[bytes, bytes]], conditions: BatchConditions | None = None
    ) -> None:
        """Add groups as (header bytes, body bytes). They have reached the operating system on return.

        Raises OSError; the partial data then ends its file, and the journal must not be appended to again.
        conditions: None for groups that were never trained (skipped batches).
        """
        file, index = self._open()
        batch = {} if conditions is None else {"batch": conditions.to_plain()}
        data, records = bytearray(), bytearray()
        path, begin = Path(file.name), file.tell()
        for header, body in sealed:
            raw = pack({"step": step, "epoch": epoch, **batch, "h": header, "b": body})
            at, crc = begin + len(data) + FRAME.size, isal_zlib.crc32(raw)
            data += FRAME.pack(len(raw), crc) + raw
            records += index_record(FrameLocation(path, at, len(raw), crc, epoch, step, read_header(header).seq))
        _write(file, data)
        # After the data: the index never names data that may not exist.
        _write(index, records)

    def flush(self) -> None:
        """Flush the open files to the device; closed files and all names are flushed already."""
        for file in (self._file, self._index):
            if file is not None:
                os.fsync(file.fileno())

    def prune(self, needed_from: int) -> None:
        """Drop the oldest files while the journal exceeds its limit. Keeps files with groups of step `needed_from` or
        later, and the file being written.
        """
        if not self._max_bytes:
            return
        files = data_files(self._folder)
        sizes = {path: sum(p.stat().st_size for p in (path, index_of(path)) if p.is_file()) for path in files}
        excess = sum(sizes.values()) - self._max_bytes
        for path in files[:-1]:
            if excess <= 0 or max((location.step for location in locations(path)), default=0) >= needed_from:
                return
            path.unlink()
            index_of(path).unlink(missing_ok=True)
            excess -= sizes[path]

    def close(self) -> None:
        """Close the open files. Unflushed data may be lost: no checkpoint depends on it."""
        for file in (self._file, self._index):
            if file is not None:
                file.close()
        self._file = self._index = None

    def _open(self) -> tuple[FileIO, FileIO]:
        if self._file is not None and self._file.tell() >= self._file_bytes:
            self.flush()  # the next checkpoint depends on this file but flushes only the one open at that time
            self.close()
        if self._file is None or self._index is None:
            durable_mkdir(self._folder)
            older = data_files(self._folder)
            for path in () if self._healed else older:
                rebuild_index(path)
            self._healed = True
            path = self._folder / f"groups-{_number(older[-1]) + 1 if older else 1:05d}.bin"
            # Unbuffered: data refused by a full disk must not be retried on close.
            self._file, self._index = FileIO(path, "xb"), FileIO(index_of(path), "wb")
            fsync_path(self._folder)
        return self._file, self._index


def read_journal(
    folder: str | Path, *, lineage: Sequence[PolicyVersion] = (), seq: int | None = None, last: int | None = None
) -> Iterator[JournalEntry]:
    """Yield every group in order of training, or those of `seq`, or the `last` ones (at least 1).

    folder   the run's `journal`
    lineage  first version of each learner start: leave out groups that a crash rolled back

    Only these are read and decoded; for the last ones, O(last + groups in a file) of the index.
    """
    wanted: list[FrameLocation] = []
    for path in reversed(data_files(Path(folder))):
        wanted[:0] = [p for p in locations(path) if not rolled_back(p, lineage) and seq in (None, p.seq)]
        if last is not None and len(wanted) >= last:
            wanted = wanted[-last:]
            break
    for location, frame in frames(wanted):
        yield JournalEntry(location.step, location.epoch, decode_as(TrajectoryGroup, frame["b"]))


def frames(wanted: Iterable[FrameLocation]) -> Iterator[tuple[FrameLocation, dict[str, Any]]]:
    """Yield the frames at these locations, opening each file once; skip damaged ones."""
    with ExitStack() as stack:
        path, file = None, None
        for location in wanted:
            if file is None or location.path != path:
                stack.close()
                path, file = location.path, stack.enter_context(location.path.open("rb"))
            frame = read_frame(file, location)
            if frame is not None:
                yield location, frame


def all_locations(folder: Path) -> list[FrameLocation]:
    """Return every group of the journal in order of training, from the indices."""
    return [location for path in data_files(folder) for location in locations(path)]


def rolled_back(location: FrameLocation, lineage: Sequence[PolicyVersion]) -> bool:
    """Return whether the step of this group did not survive a crash."""
    return is_orphan(PolicyVersion(location.epoch, location.step), lineage)


def data_files(folder: Path) -> list[Path]:
    """Return the files of the journal, oldest first."""
    return sorted((p for p in entries(folder, "groups-*.bin") if p.stem.split("-")[1].isdigit()), key=_number)


def _write(file: FileIO, data: bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _number(path: Path) -> int:
    return int(path.stem.split("-")[1])
