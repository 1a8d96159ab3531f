"""Atomic and durable files: write, fsync, rename, fsync the folder. And a lock for changes that need several renames.

A file survives a power cut once its content and its name are on the device. The name is part of the folder, and the
folder's name part of the folder above. Acknowledge or announce a file only after both are flushed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path
from typing import Any

from protocol.errors import UserError

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 20.0
FREE_SPACE = "free disk space and run the same command again"
LOCK_POLL_S = 0.05
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)


def try_lock(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed or its process ends. Return False if another one holds the lock.

    Raises OSError on a file system without locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def folder_lock(folder: Path, wait_s: float | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `folder`. The kernel releases it if the process exits.

    Raises TimeoutError (an OSError) after `wait_s` (default: LOCK_TIMEOUT_S). On a file system without locks it only
    logs a warning.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        wait_s = LOCK_TIMEOUT_S if wait_s is None else wait_s
        deadline = time.monotonic() + wait_s
        try:
            while not try_lock(handle):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {folder} for {wait_s:.0f} s")
                time.sleep(LOCK_POLL_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s cannot be locked: %s", folder, error)
        yield
    finally:
        os.close(handle)


@contextmanager
def sole_user(folder: Path, refused: UserError) -> Iterator[None]:
    """Create `folder` and hold its lock. Raises `refused` while another process holds it."""
    durable_mkdir(folder)
    with ExitStack() as held:
        try:
            held.enter_context(folder_lock(folder, wait_s=0.0))
        except TimeoutError:
            raise refused from None
        yield


def is_full(error: OSError) -> bool:
    """Return whether a write failed because the disk, or the user's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or (
        error.errno is None and re.fullmatch(r"\d+ requested and \d+ written", str(error)) is not None  # numpy
    )


DIGEST_BLOCKS, DIGEST_BLOCK = 256, 4096
"""Number and bytes of the blocks of a file that `model_digest` reads."""


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the device."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder below, each folder after its content, and `folder` last."""
    for path in reversed((folder, *below(folder))):
        fsync_path(path)


def durable_mkdir(folder: Path) -> None:
    """Create `folder` and its missing parents, and flush the name of each."""
    if folder.is_dir():
        return
    durable_mkdir(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_path(folder.parent)


def atomic_write(
    path: Path,
    data: str | bytes | Iterable[bytes],
    *,
    durable: bool,
    mode: int = 0o666,
    guard: Callable[[Path], AbstractContextManager[None]] | None = None,
) -> None:
    """Replace the content of `path` atomically: a reader sees the old or the new content, also after a crash.

    durable  the new content is on the device when this returns; without it a power cut may undo the write
    guard    called with the written temporary file; its result is entered for the rename alone, e.g. a lock. If it
             raises, `path` is unchanged
    """
    with _temporary(path, data, mode, durable=durable) as part, guard(part) if guard else nullcontext():
        part.replace(path)
    if durable:
        fsync_path(path.parent)


def create_once(path: Path, text: str, mode: int = 0o666) -> bool:
    """Create `path` with `text`, atomically and durably. Return False, and leave the file unchanged, if it exists.

    If several processes call this concurrently, one file is on the device when the first call returns.
    """
    created = False
    if not path.exists():  # with nothing to write, a full disk must not cause an error
        with _temporary(path, text, mode, durable=True) as part, suppress(FileExistsError):
            os.link(part, path)  # unlike a rename, it does not replace
            created = True
    fsync_path(path.parent)
    return created


@contextmanager
def _temporary(path: Path, data: str | bytes | Iterable[bytes], mode: int, *, durable: bool) -> Iterator[Path]:
    """Write `data` to a temporary file next to `path`. The file is deleted after the block, unless it was renamed."""
    pieces = (data.encode(),) if isinstance(data, str) else (data,) if isinstance(data, bytes) else data
    part = path.with_name(
        f".{path.name}.{secrets.token_hex(4)}.tmp"
    )  # hosts may share the folder and use the same pids
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.writelines(pieces)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)


def entries(folder: Path, pattern: str) -> list[Path]:
    """Return what `pattern` names directly in `folder`, [] if there is no folder.

    Raises OSError if it cannot be listed: since Python 3.12 `Path.glob` shows such a folder as empty.
    """
    try:
        return [folder / name for name in os.listdir(folder) if fnmatch(name, pattern)]
    except FileNotFoundError:
        return []


def below(folder: Path) -> list[Path]:
    """Return every file and folder below `folder`, sorted, a folder before its content; links are not followed.

    Raises OSError if one cannot be listed: `os.walk` and, since Python 3.12, `Path.rglob` show it as empty.
    """

    def fail(error: OSError) -> None:
        raise error

    found = os.walk(folder, onerror=fail)
    return sorted(Path(at, name) for at, folders, files in found for name in (*folders, *files))


def open_regular(path: Path) -> BufferedReader:
    """Open `path` for reading. Raises OSError for anything but a regular file: a link is not followed."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


@contextmanager
def reading(what: object, todo: str) -> Iterator[None]:
    """Turn an OSError of the block into a UserError: `what` cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {what}", why=error.strerror or str(error), todo=todo) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; {} without a file, or with another value in it. Raises UserError."""
    if not path.is_file():
        return {}
    try:
        with reading(path, "make it readable"):
            found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON", why=str(error)) from None
    return found if isinstance(found, dict) else {}


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as file:
        return sha256_stream(file)


def sha256_stream(file: BufferedReader) -> str:
    """Return the sha256, in hex, of an open file from its current position to its end."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def model_digest(directory: Path) -> str:
    """Return a digest (hex) that tells models in Hugging Face layout apart without reading them whole: sha256 of names
    and sizes of the safetensors files and of blocks of 4 KiB, the first and evenly spaced ones. "" without such files.

    Fine-tuned weights differ nearly everywhere, so blocks find them. It is no protection against forgery.
    """
    digest, files = hashlib.sha256(), sorted(directory.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(DIGEST_BLOCK, size // DIGEST_BLOCKS)):
                file.seek(place)
                digest.update(file.read(DIGEST_BLOCK))
    return digest.hexdigest() if files else ""


def lineage_of(run_dir: Path) -> str:
    """Return the lineage id of a run directory; "" if it has none, or it cannot be read."""
    from protocol.run_meta import LINEAGE_FILE, lineage_id_in  # imports numpy

    try:
        return lineage_id_in((run_dir / LINEAGE_FILE).read_text(errors="replace"))
    except OSError:
        return ""
