"""Is a published policy version on disk what the learner says it is? Checked before the engine sees it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from protocol.errors import ForayError
from protocol.messages import WeightUpdate

MANIFEST = "manifest.json"
CHUNK = 4 << 20


class WeightsCorrupt(ForayError):
    """The directory of a version is missing, incomplete, or differs from its manifest."""


def verify(update: WeightUpdate) -> Path:
    """The directory of `update`, every file of its manifest checked by size and sha256; raises WeightsCorrupt.

    Reads every byte: call it in a thread.
    """
    directory = Path(update.path)
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        version, digest, files = str(manifest["version"]), str(manifest["digest"]), dict(manifest["files"])
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsCorrupt(f"{directory}: no usable manifest: {type(error).__name__}: {error}") from None
    if version != update.version.label or digest != update.digest:
        raise WeightsCorrupt(f"{directory}: the manifest is of {version} {digest[:12]}, wanted {update.version.label}")
    if not any(name.endswith(".safetensors") for name in expected):
        raise WeightsCorrupt(f"{directory}: the manifest lists no weights")
    for name, (size, sha256) in expected.items():
        if Path(name).name != name:
            raise WeightsCorrupt(f"{directory}: {name!r} is not the name of a file in it")
        _check(directory / name, size, sha256)
    return directory


def _check(path: Path, size: int, sha256: str) -> None:
    try:
        if path.stat().st_size != size:
            raise WeightsCorrupt(f"{path}: {path.stat().st_size} bytes, the manifest says {size}")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise WeightsCorrupt(f"{path}: {error.strerror or error}") from None
    if digest.hexdigest() != sha256:
        raise WeightsCorrupt(f"{path}: its sha256 differs from the manifest's")
