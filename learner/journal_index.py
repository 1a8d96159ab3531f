"""The index beside each file of the journal: where every group lies, so that none is read to find another.

`groups-NNNNN.idx` holds one record of fixed size for each frame of `groups-NNNNN.bin`, with a checksum of its own.
What is missing, cut short or damaged is found again from the data, which alone is the truth. Readers do that in
memory; only the learner that begins a new file of the journal writes the older ones' indices anew.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from learner.durable import write_bytes
from protocol.codec import MAX_BYTES, unpack
from protocol.errors import ProtocolError
from protocol.header import read_header

log = logging.getLogger(__name__)

FRAME = struct.Struct("<II")
"""Head of a frame of the data: length and CRC-32 of what follows."""
_RECORD = struct.Struct("<QIIIQQ")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size


class Place(NamedTuple):
    """One group in the journal: file, first byte of the frame's content, its length and CRC-32, and whose it is."""

    path: Path
    offset: int
    length: int
    crc: int
    epoch: int
    step: int
    seq: int

    @property
    def end(self) -> int:
        """First byte after the frame."""
        return self.offset + self.length


def index_of(data: Path) -> Path:
    """The index of a file of the journal."""
    return data.with_suffix(".idx")


def record(place: Place) -> bytes:
    """The place as the index holds it."""
    raw = _RECORD.pack(place.offset, place.length, place.crc, place.epoch, place.step, place.seq)
    return raw + _CHECK.pack(zlib.crc32(raw))


def places(data: Path) -> list[Place]:
    """Every whole frame of the file, in order; nothing is written."""
    indexed = _indexed(data)
    return [*indexed, *_scan(data, indexed[-1].end if indexed else 0)]


def heal(data: Path) -> None:
    """Writes the index anew unless it says exactly what it should."""
    wanted = b"".join(record(place) for place in places(data))
    index = index_of(data)
    if index.is_file() and index.read_bytes() == wanted:
        return
    log.warning("%s is written anew from the data", index)
    write_bytes(index, wanted)


def read_frame(file: BinaryIO, place: Place) -> dict[str, Any] | None:
    """The frame at `place` of the open file, unpacked; None when it is not what was written there."""
    file.seek(place.offset)
    raw = file.read(place.length)
    if len(raw) != place.length or zlib.crc32(raw) != place.crc:
        log.warning("%s: the group of seq %d at byte %d is damaged", place.path, place.seq, place.offset)
        return None
    frame: dict[str, Any] = unpack(raw)
    return frame


def _indexed(data: Path) -> list[Place]:
    """What the index says, as far as it is sound and the data is there."""
    try:
        raw = index_of(data).read_bytes()
    except FileNotFoundError:
        return []
    found: list[Place] = []
    end, size = 0, data.stat().st_size
    for at in range(0, len(raw) - RECORD_BYTES + 1, RECORD_BYTES):
        body = raw[at : at + _RECORD.size]
        place = Place(data, *_RECORD.unpack(body))
        (check,) = _CHECK.unpack_from(raw, at + _RECORD.size)
        if zlib.crc32(body) != check or place.offset != end + FRAME.size or place.end > size:
            break
        found.append(place)
        end = place.end
    return found


def _scan(data: Path, start: int) -> Iterator[Place]:
    """Frames from byte `start` on. A damaged frame, or one cut short, ends the file: nothing says where the next is."""
    with data.open("rb") as file:
        file.seek(start)
        while head := file.read(FRAME.size):
            offset = file.tell()
            length, crc = FRAME.unpack(head) if len(head) == FRAME.size else (0, 0)
            raw = file.read(length) if 0 < length <= 2 * MAX_BYTES else b""
            if not raw or len(raw) != length or zlib.crc32(raw) != crc:
                log.warning("%s: the frame before byte %d is damaged, the rest is left out", data, file.tell())
                return
            try:
                frame = unpack(raw)
                place = Place(data, offset, length, crc, frame["epoch"], frame["step"], read_header(frame["h"]).seq)
                record(place)
            except (ProtocolError, KeyError, TypeError, struct.error):
                log.warning("%s: the frame before byte %d is none of ours, the rest is left out", data, file.tell())
                return
            yield place
