"""Files that survive a power cut: flush, rename, flush the folder. And a lock for what takes more than one rename.

A file is on the device when its content is, and when its name is: the name belongs to the folder, and the folder's to
the folder above it. What others rely on (a rename into place, an acknowledgement, an announcement) comes after both.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

log = logging.getLogger(__name__)

LOCK_PATIENCE_S = 20.0
LOCK_POLL_S = 0.05
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps every other process out that locks this folder; the lock of a process that dies is free at once.

    Raises TimeoutError (an OSError) after LOCK_PATIENCE_S: its holder stands still. A file system without locks is
    worked on without.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {folder} for {LOCK_PATIENCE_S:.0f} s") from None
                time.sleep(LOCK_POLL_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning("%s cannot be locked: %s", folder, error)
                break
        yield
    finally:
        os.close(handle)


def flush(path: Path) -> None:
    """Flushes a file or a folder to the device."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_tree(folder: Path) -> None:
    """Flushes every file and folder below, each folder after what is in it, and `folder` last."""
    for at, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush(Path(at, name))
        flush(Path(at))


def make_folder(folder: Path) -> None:
    """Makes `folder` and those above it that are missing, and flushes the name of each."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    flush(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step: a reader sees the old text or the new one, also after a crash."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """As `write_text`."""
    with _whole(path, data, 0o666) as part:
        part.replace(path)
    flush(path.parent)


def write_once(path: Path, text: str, mode: int = 0o666) -> bool:
    """Makes `path` with `text`, whole or not at all; False when it is there, and then it stays as it is.

    Whoever makes it, of several at once: when this returns, the file of one of them is on the device.
    """
    made = False
    if not path.exists():  # a full disk is no reason to fail when there is nothing to write
        with _whole(path, text.encode(), mode) as part, suppress(FileExistsError):
            os.link(part, path)  # unlike a rename, it does not replace
            made = True
    flush(path.parent)
    return made


@contextmanager
def _whole(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """A flushed file beside `path` that holds `data`; gone after the block, unless it was renamed."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # hosts may share the folder, and pids
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)


def open_regular(path: Path) -> BufferedReader:
    """`path` opened for reading. Raises OSError for anything but a regular file: a link is not followed."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def sha256(path: Path) -> str:
    """sha256 hex of a file."""
    with path.open("rb") as file:
        return sha256_of(file)


def sha256_of(file: BufferedReader) -> str:
    """sha256 hex of what an open file holds from here on."""
    return hashlib.file_digest(file, "sha256").hexdigest()
