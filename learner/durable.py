"""Files that survive a power cut: flush, rename, flush the folder. And a lock for what takes more than one rename."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step: a reader sees the old text or the new one, also after a crash."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    part.write_text(text)
    flush(part)
    part.replace(path)
    flush(path.parent)


def make_once(path: Path, text: str) -> None:
    """Writes `path` (mode 0600) unless it is there. Whole or not at all: two starts at once must see one text."""
    if path.exists():
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(part, path)  # unlike rename, it does not replace
        flush(path.parent)
    finally:
        part.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """sha256 hex of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
