"""Which file it is, without reading tens of GB: its size and a hash over blocks spread through it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from protocol.errors import UserError

BLOCK = 4096
BLOCKS = 64


def file_digest(path: Path) -> dict[str, Any]:
    """`bytes` (size) and `sha256_of_blocks` (16 hexadecimal digits): the same wherever the file lies.

    Reads the head, the tail and what is evenly between, 256 KiB in all. UserError when it cannot be read.
    """
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for i in range(BLOCKS):
                file.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
                digest.update(file.read(BLOCK))
    except OSError as error:
        raise UserError(
            f"cannot read the index file {path}",
            why=error.strerror or str(error),
            todo="give index.file the path of a FAISS file, or leave it out to build from the corpus",
        ) from None
    return {"bytes": size, "sha256_of_blocks": digest.hexdigest()[:16]}
