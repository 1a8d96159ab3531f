"""Is a published policy version on disk what the learner says it is? Checked before the engine sees it.

The directory may be shared with others, so nothing in it is believed: a manifest of bounded size, plain names only,
regular files only (no link is followed), each as long as the manifest says and with its sha256, and nothing beside
them, since an engine loads a directory and not a list.
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
"""Limits of a manifest: of its size, and of what it may list (16 TiB together)."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""What would be executed when it is loaded. Weights are safetensors."""


class WeightsCorrupt(ForayError):
    """The directory of a version is missing, incomplete, or differs from its manifest."""


def verify(update: WeightUpdate) -> Path:
    """The directory of `update`, every file of its manifest checked by size and sha256; raises WeightsCorrupt.

    Reads every byte: call it in a thread.
    """
    directory = Path(update.path)
    if directory.is_symlink():
        raise WeightsCorrupt(f"{directory} is a link, not the directory of a version")
    try:
        manifest = json.loads(_read(directory / MANIFEST))
        version, digest, files = str(manifest["version"]), str(manifest["digest"]), dict(manifest["files"])
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise WeightsCorrupt(f"{directory}: no usable manifest: {type(error).__name__}: {error}") from None
    if version != update.version.label or digest != update.digest:
        raise WeightsCorrupt(f"{directory}: the manifest is of {version} {digest[:12]}, wanted {update.version.label}")
    _refuse_strange(directory, expected)
    for name, (size, sha256) in expected.items():
        _check(directory / name, size, sha256)
    return directory


def _refuse_strange(directory: Path, expected: dict[str, Any]) -> None:
    """Raises WeightsCorrupt for names that are none, for too much, and for what is there and not listed."""
    if not any(name.endswith(".safetensors") for name in expected):
        raise WeightsCorrupt(f"{directory}: the manifest lists no weights")
    for name in expected:
        if not NAME.fullmatch(name) or name == MANIFEST:
            raise WeightsCorrupt(f"{directory}: {name[:200]!r} is not the name of a file in it")
        if name.endswith(PICKLES):
            raise WeightsCorrupt(f"{directory}: {name} would be executed by loading it; only safetensors are loaded")
    sizes = [size for size, _ in expected.values()]
    if len(sizes) > MOST_FILES or min(sizes) < 0 or sum(sizes) > MOST_BYTES:
        raise WeightsCorrupt(f"{directory}: {len(sizes)} files of {sum(sizes)} bytes are no version of a policy")
    try:
        # hidden ones are the file system's own (NFS), and no engine reads them
        there = {name for name in os.listdir(directory) if not name.startswith(".")}
    except OSError as error:
        raise WeightsCorrupt(f"{directory}: {error.strerror}") from None
    if strange := sorted(there - {MANIFEST, *expected}):
        raise WeightsCorrupt(f"{directory}: {strange[0]!r} is there, and the manifest does not list it")


def _open(path: Path) -> int:
    """A descriptor of a regular file; raises OSError for anything else, links too. Does not wait for a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return handle


def _read(path: Path) -> bytes:
    with os.fdopen(_open(path), "rb") as file:
        raw = file.read(MANIFEST_BYTES + 1)
    if len(raw) > MANIFEST_BYTES:
        raise ValueError(f"it has more than {MANIFEST_BYTES} bytes")
    return raw


def _check(path: Path, size: int, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        with os.fdopen(_open(path), "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise WeightsCorrupt(f"{path}: {found} bytes, the manifest says {size}")
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise WeightsCorrupt(f"{path}: {error.strerror or error}") from None
    if digest.hexdigest() != sha256:
        raise WeightsCorrupt(f"{path}: its sha256 differs from the manifest's")
