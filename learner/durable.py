"""Files that survive a power cut: flush, rename, flush the folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


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


def sha256(path: Path) -> str:
    """sha256 hex of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
