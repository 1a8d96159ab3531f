"""The journal: every group that was trained, as it came, with the step it was trained in. For replay and for people.

Frames (u32 length, u32 CRC-32, msgpack {step, epoch, h, b}; little-endian) in files `groups-NNNNN.bin`; each learner
start begins a new file. Groups are written after the optimiser step and before its checkpoint, so that a change of
(epoch, step) is a change of batch. Steps that a crash rolled back are still in there, under their old epoch:
`read_journal` leaves them out when it is given the lineage from a checkpoint. A frame cut short by a crash
ends its file.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from protocol.codec import MAX_BYTES, decode_as, pack, unpack
from protocol.messages import TrajectoryGroup
from protocol.versions import PolicyVersion, is_orphan

log = logging.getLogger(__name__)

FILE_BYTES = 64 << 20
_FRAME = struct.Struct("<II")


@dataclass(frozen=True)
class JournalEntry:
    """A group that was trained in step `step` (the first one is 1) by the learner of `epoch`."""

    step: int
    epoch: int
    group: TrajectoryGroup


class Journal:
    """Appends to a folder; a file is closed for the next one at FILE_BYTES."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def append(self, step: int, epoch: int, sealed: Iterable[tuple[bytes, bytes]]) -> None:
        """Adds groups as (header bytes, body bytes). They are with the operating system when this returns."""
        file = self._open()
        for header, body in sealed:
            raw = pack({"step": step, "epoch": epoch, "h": header, "b": body})
            file.write(_FRAME.pack(len(raw), zlib.crc32(raw)) + raw)
        file.flush()

    def flush(self) -> None:
        """Flushes to the device."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        if self._file is not None and self._file.tell() >= FILE_BYTES:
            self.close()
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            last = max((int(p.stem.split("-")[1]) for p in _files(self._folder)), default=0)
            self._file = (self._folder / f"groups-{last + 1:05d}.bin").open("xb")
        return self._file


def read_journal(folder: Path, *, lineage: Sequence[PolicyVersion] = ()) -> Iterator[JournalEntry]:
    """Every group in order of training. lineage: leave out what a crash rolled back."""
    for path in _files(folder):
        with path.open("rb") as file:
            for raw in _frames(file, path):
                frame = unpack(raw)
                if not is_orphan(PolicyVersion(frame["epoch"], frame["step"]), lineage):
                    yield JournalEntry(frame["step"], frame["epoch"], decode_as(TrajectoryGroup, frame["b"]))


def _frames(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while head := file.read(_FRAME.size):
        length, crc = _FRAME.unpack(head) if len(head) == _FRAME.size else (0, 0)
        raw = file.read(length) if 0 < length <= 2 * MAX_BYTES else b""
        if not raw or len(raw) != length or zlib.crc32(raw) != crc:
            log.warning("%s: the frame before byte %d is damaged, the rest of the file is left out", path, file.tell())
            return
        yield raw


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("groups-*.bin") if p.stem.split("-")[1].isdigit())
