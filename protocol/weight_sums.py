"""The checksum of all tensors of a version, computed by the learner and by each engine, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def sum_of(sums: Mapping[str, str]) -> str:
    """Return the sha256 hex over the names and sha256 of all tensors, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(f"{name} {sums[name]}\n".encode())
    return digest.hexdigest()
