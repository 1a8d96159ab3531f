"""Verify a published policy version on disk, before the engine reads it.

The directory may be shared and is not trusted: the manifest has a bounded size and plain file names only, the files are
regular files (links are not followed) with the size and sha256 of the manifest, and there are no others, since an
engine loads a directory and not a list.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from protocol.errors import ForayError
from protocol.messages import WeightUpdate

MANIFEST = "manifest.json"
CHUNK = 4 << 20
MANIFEST_BYTES, MOST_FILES, MOST_BYTES = 16 << 20, 10_000, 1 << 44
"""Limits of a manifest: its size, and the number and total size of its files (16 TiB)."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""File types that execute code when they are loaded. Weights are safetensors."""


class WeightsCorrupt(ForayError):
    """The directory of a version is missing, incomplete, or differs from its manifest."""


class WeightsAbsent(WeightsCorrupt):
    """This host has no readable directory of the version."""


def is_present(update: WeightUpdate) -> bool:
    """Return whether this host has a directory of the version that it can read."""
    return os.access(update.path, os.R_OK | os.X_OK)


def verify(update: WeightUpdate) -> Path:
    """Check every file of `update` by size and sha256, and return its directory. Raises WeightsCorrupt.

    Reads every byte: call it in a thread.
    """
    directory = Path(update.path)
    if directory.is_symlink():
        raise WeightsCorrupt(f"{directory} is a symbolic link, not the directory of a version")
    if not is_present(update):
        raise WeightsAbsent(f"{directory} is not on this host, or cannot be read")
    try:
        manifest = json.loads(_read(directory / MANIFEST))
        version, digest, files = str(manifest["version"]), str(manifest["digest"]), dict(manifest["files"])
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise WeightsCorrupt(f"{directory}: cannot use its manifest: {type(error).__name__}: {error}") from None
    if version != update.version.label or digest != update.digest:
        raise WeightsCorrupt(f"{directory}: the manifest is of {version} {digest[:12]}, not of {update.version.label}")
    _refuse_strange(directory, expected)
    for name, (size, sha256) in expected.items():
        _check(directory / name, size, sha256)
    return directory


def _refuse_strange(directory: Path, expected: dict[str, Any]) -> None:
    """Raise WeightsCorrupt for invalid names, for too many or too large files, and for unlisted files."""
    if not any(name.endswith(".safetensors") for name in expected):
        raise WeightsCorrupt(f"{directory}: the manifest lists no weights")
    for name in expected:
        if not NAME.fullmatch(name) or name == MANIFEST:
            raise WeightsCorrupt(f"{directory}: {name[:200]!r} is not a plain file name")
        if name.endswith(PICKLES):
            raise WeightsCorrupt(f"{directory}: {name} could execute code when loaded; only safetensors are allowed")
    sizes = [size for size, _ in expected.values()]
    if len(sizes) > MOST_FILES or min(sizes) < 0 or sum(sizes) > MOST_BYTES:
        raise WeightsCorrupt(f"{directory}: {len(sizes)} files of {sum(sizes)} bytes exceed the limits of a version")
    try:
        # hidden files belong to the file system (NFS), and engines do not read them
        there = {name for name in os.listdir(directory) if not name.startswith(".")}
    except OSError as error:
        raise WeightsCorrupt(f"{directory}: {error.strerror}") from None
    if strange := sorted(there - {MANIFEST, *expected}):
        raise WeightsCorrupt(f"{directory}: {strange[0]!r} is not listed in the manifest")


def _open(path: Path) -> int:
    """Open a regular file. Raises OSError for anything else, also for links. Does not block on a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return handle


def _read(path: Path) -> bytes:
    with os.fdopen(_open(path), "rb") as file:
        raw = file.read(MANIFEST_BYTES + 1)
    if len(raw) > MANIFEST_BYTES:
        raise ValueError(f"it is larger than {MANIFEST_BYTES} bytes")
    return raw


def _check(path: Path, size: int, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        with os.fdopen(_open(path), "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise WeightsCorrupt(f"{path}: {found} bytes, but {size} in the manifest")
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise WeightsCorrupt(f"{path}: {error.strerror or error}") from None
    if digest.hexdigest() != sha256:
        raise WeightsCorrupt(f"{path}: its sha256 differs from the manifest")
