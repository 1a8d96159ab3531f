"""Which policy an answer is of: a version is a number within one run, and a model that nobody trains is always 0.0."""

from __future__ import annotations

import hashlib
from pathlib import Path

PIECES, PIECE_BYTES = 16, 1 << 16
"""What is read of a file of weights: so many pieces at equal distances, each of so many bytes."""


def model_digest(model: Path) -> str:
    """sha256 (hex) over the names, sizes and samples of the files of a model directory that decide what it answers.

    Weights are not read whole (that takes minutes for a large model): training changes every tensor, so samples differ.
    Of a directory without weights (a rollout server needs the tokenizer alone) the digest is of what is there.
    """
    digest = hashlib.sha256()
    for path in sorted((*model.glob("*.json"), *model.glob("*.jinja"), *model.glob("*.safetensors"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in range(PIECES):
                file.seek(size * piece // PIECES)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()
