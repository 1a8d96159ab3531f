"""The logs of a run's processes: entries with their times, merged, and followed across rotation.

An entry is a line with a time, and the lines without one that follow it, such as a traceback. The formats of our own
processes, Redis, SGLang and DeepSpeed are known. Times are those of this host's clock, as the processes print them.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STAMP = re.compile(
    r"\[?(?P<at>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[,.](?P<part>\d{1,6}))?[^\s\]]*\]?\s+"
    rf"(?:\[?(?P<level>{'|'.join(LEVELS)}|WARN)\b)?"
)
_REDIS = re.compile(r"\d+:[XCSM] (?P<at>\d\d \w{3} \d{4} \d\d:\d\d:\d\d)\.(?P<part>\d+) (?P<level>[.\-*#]) ")
_FAILS = re.compile(r"Traceback \(most recent call last\)|error: ")
_OF_REDIS = {".": "DEBUG", "-": "DEBUG", "*": "INFO", "#": "WARNING"}
MAX_LINE = 16 * 1024
"""Longer lines are cut, in bytes."""


@dataclass(frozen=True)
class LogEntry:
    """One entry. `at`: seconds since 1970, 0 if no line before it has a time. Its order is that of the file."""

    process: str
    at: float
    level: str
    lines: tuple[str, ...]

    @property
    def is_error(self) -> bool:
        """Return whether it reports an error: by its level, or by a traceback or message without one after it."""
        return self.level in ("ERROR", "CRITICAL") or any(map(_FAILS.match, self.lines))


def stamp_of(line: str) -> tuple[float, str] | None:
    """Return (seconds since 1970, level) of a line, None if it does not begin with a time."""
    if found := _REDIS.match(line):
        form, level = "%d %b %Y %H:%M:%S", _OF_REDIS[found["level"]]
    elif found := _STAMP.match(line):
        form, level = "%Y-%m-%d %H:%M:%S", {"WARN": "WARNING", None: "INFO"}.get(found["level"], found["level"])
    else:
        return None
    try:
        at = datetime.strptime(found["at"].replace("T", " "), form).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return at + float(f"0.{found['part'] or 0}"), level


class LogFile:
    """A log that is read from its beginning, or its last `end` bytes, and again after it was rotated: moved away, or
    truncated."""

    def __init__(self, path: Path, *, end: int = 0) -> None:
        self.path, self.process, self._end = path, path.stem, end
        self._file: BinaryIO | None = None
        self._rest = b""
        self._at, self._level = 0.0, "INFO"

    def read(self) -> Iterator[LogEntry]:
        """Yield the entries of complete lines that were written since the last call."""
        lines: list[str] = []
        for line in self._lines():
            if stamp := stamp_of(line):
                yield from self._entry(lines)
                (self._at, self._level), lines = stamp, []
            lines.append(line)
        yield from self._entry(lines)

    def _entry(self, lines: list[str]) -> Iterator[LogEntry]:
        if lines:
            yield LogEntry(self.process, self._at, self._level, tuple(lines))

    def _lines(self) -> Iterator[str]:
        while True:
            if self._file is None:
                try:
                    self._file = self.path.open("rb")
                except FileNotFoundError:
                    return
                if self._end and self._file.seek(0, os.SEEK_END) > self._end:
                    self._file.seek(-self._end, os.SEEK_END)
                    self._file.readline(self._end)  # the rest of a line
                else:
                    self._file.seek(0)
            for raw in self._file:
                self._rest += raw
                if raw.endswith(b"\n"):
                    yield self._line()
            if not self._was_rotated(self._file):
                return
            if self._rest:  # the last line of the old file
                yield self._line()

    def _line(self) -> str:
        raw, self._rest = self._rest.rstrip(b"\r\n"), b""
        return raw[:MAX_LINE].decode(errors="replace")

    def _was_rotated(self, file: BinaryIO) -> bool:
        """Return whether the path names another file, or a shorter one: then it is read from the beginning."""
        mine = os.fstat(file.fileno())
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False  # moved away, and the new one is not there yet
        if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino) and there.st_size >= file.tell():
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the file; a later `read` begins at its start."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None


def processes_of(directory: Path) -> dict[str, Path]:
    """Return the logs of a run by process: `logs/NAME.log`."""
    return {path.stem: path for path in sorted((directory / "logs").glob("*.log"))}


def is_of(name: str, wanted: Iterable[str]) -> bool:
    """Return whether the process `name` is one of `wanted`: `engine` means every engine, `engine-1` its node and it."""
    words = tuple(wanted)
    return not words or any(name == word or name.startswith((f"{word}-", f"{word}.")) for word in words)


def merged(files: Iterable[LogFile]) -> Iterator[LogEntry]:
    """Yield the new entries of all files by time. Entries of one file stay in order."""
    return heapq.merge(*(_ascending(file.read()) for file in files), key=lambda entry: entry.at)


def _ascending(entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
    """Yield the entries, none with an earlier time than the one before: a clock may have been set back."""
    latest = 0.0
    for entry in entries:
        latest = max(latest, entry.at)
        yield entry if entry.at == latest else LogEntry(entry.process, latest, entry.level, entry.lines)
