"""The directory `.NAME.building` in which the index NAME is built: one builder at a time, resumable after a kill.

The lock is a kernel lock (`flock`), which is released when its process ends.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from protocol.errors import UserError
from protocol.runtime.files import atomic_write, below, fsync_path, fsync_tree, try_lock
from retriever.corpus.corpus import CorpusScan

_LOCK = "lock"
_POLL_S = 0.1
_NAME_LOOKS = 20
JOURNAL = "journal.json"


class BuildDirectory:
    """`with BuildDirectory(out, say) as workdir:` locks the directory in which `out` is built, waiting if necessary.

    The parent of `out` exists. The directory stays unless `publish` or `discard` is called.
    `waited`: another process was building `out`.
    """

    def __init__(self, out: Path, say: Callable[[str], None]) -> None:
        self.out, self._say = out, say
        self.directory = out.with_name(f".{out.name}.building")
        self.waited = False
        self._lock = -1

    def __enter__(self) -> Self:
        while not self._try():
            if not self.waited:
                self._say(f"another process is building {self.out} ({self._holder()}): waiting for it")
            self.waited = True
            time.sleep(_POLL_S)
        return self

    def _try(self) -> bool:
        try:
            # not exist_ok, which checks for existence after mkdir failed: by then it may be published
            self.directory.mkdir()
        except FileExistsError:
            pass
        try:
            lock = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return False  # it has just been published
        try:
            # the locked directory may have become the finished index
            ours = try_lock(lock) and os.fstat(lock).st_ino == (self.directory / _LOCK).stat().st_ino
        except FileNotFoundError:
            ours = False
        if not ours:
            os.close(lock)
            return False
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._lock = lock
        return True

    def _holder(self) -> str:
        for _ in range(_NAME_LOOKS):
            try:
                if name := (self.directory / _LOCK).read_text():
                    return name
            except OSError:
                return "it is about to finish"
            time.sleep(_POLL_S)  # it has the lock but has not written its name yet
        return "unknown process"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._lock)

    def clear(self, keep: set[str]) -> None:
        """Delete the files of an earlier builder, except those named (paths relative to the directory)."""
        for path in sorted(self.directory.rglob("*"), reverse=True):
            name = path.relative_to(self.directory).as_posix()
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif name not in keep and name != _LOCK:
                path.unlink()

    def discard(self) -> None:
        """Delete everything."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def sync(self) -> None:
        """Make everything durable."""
        fsync_tree(self.directory)

    def publish(self, without: str) -> None:
        """Make everything durable, rename the directory to `out`, then delete the file `without` in it, with which a
        killed builder could still have resumed. A previous `out` is moved aside and deleted last; open readers keep
        their files."""
        self.sync()
        aside = self.directory.with_name(self.directory.name + ".old")
        shutil.rmtree(aside, ignore_errors=True)
        if self.out.exists():
            self.out.rename(aside)
        self.directory.rename(self.out)
        fsync_path(self.out.parent)
        (self.out / without).unlink(missing_ok=True)
        (self.out / _LOCK).unlink()
        shutil.rmtree(aside, ignore_errors=True)


class BuildJournal:
    """`journal.json` in the building directory: the durable part of an unfinished build.

    Read at the start; every setter writes it durably. Data are flushed before they are recorded, and the file is
    replaced by a rename.

    input    `CorpusInput.stamp` at the scan of the corpus
    scan     fields of `corpus.CorpusScan`
    index    identity of the index once all its files exist, else None
    vectors  name of a vector file -> {"identity": of corpus and encoder, "rows": number of durable rows}
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL
        self._content: dict[str, Any] = {}
        if self._path.exists():
            self._content = _read(self._path)

    @property
    def input(self) -> dict[str, Any] | None:
        """Return the stamp of the scanned input; None: nothing has been scanned."""
        found: dict[str, Any] | None = self._content.get("input")
        return found

    @property
    def scan(self) -> dict[str, Any]:
        """Return the scan; requires `input`."""
        found: dict[str, Any] = self._content["scan"]
        return found

    @property
    def vector_files(self) -> set[str]:
        """Return the vector files with rows."""
        return set(self._content.get("vectors", {}))

    @property
    def index(self) -> dict[str, Any] | None:
        """See the class."""
        found: dict[str, Any] | None = self._content.get("index")
        return found

    def scanned(self, stamp: dict[str, Any], scan: dict[str, Any]) -> None:
        """Record that the corpus and its arrays are on disk; discard everything else."""
        self._content = {"input": stamp, "scan": scan, "vectors": {}}
        self._write()

    def restamped(self, stamp: dict[str, Any]) -> None:
        """Record a new stamp of the same corpus."""
        self._content["input"] = stamp
        self._write()

    def rows(self, name: str) -> tuple[dict[str, Any], int]:
        """Return (identity, rows on disk) of a vector file; ({}, 0) if it is new."""
        entry = self._content["vectors"].get(name)
        return ({}, 0) if entry is None else (entry["identity"], entry["rows"])

    def wrote(self, name: str, identity: dict[str, Any], rows: int) -> None:
        """Record that the first `rows` rows of the file are on disk."""
        self._content["vectors"][name] = {"identity": identity, "rows": rows}
        self._content.pop("index", None)
        self._write()

    def built(self, identity: dict[str, Any]) -> None:
        """Record that all files of the index are on disk."""
        self._content["index"] = identity
        self._write()

    def _write(self) -> None:
        atomic_write(self._path, json.dumps(self._content), durable=True)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a journal. Raises UserError if it is damaged."""
    try:
        content = json.loads(path.read_text())
        vectors = content.get("vectors", {})
        if content.get("input") is not None:
            CorpusScan(**content["scan"])
        if not all(isinstance(entry["identity"], dict) and type(entry["rows"]) is int for entry in vectors.values()):
            raise ValueError("an invalid entry of a vector file")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged",
            why=f"{type(error).__name__}: {str(error)[:200]}",
            todo=f"remove {path.parent} and build again: its content cannot be trusted",
        ) from None
    found: dict[str, Any] = content
    return found


def files_in(directory: Path) -> list[str]:
    """Return the names of the files below a directory, in order, except the lock."""
    found = (path.relative_to(directory).as_posix() for path in below(directory) if path.is_file())
    return sorted(name for name in found if name != _LOCK)
