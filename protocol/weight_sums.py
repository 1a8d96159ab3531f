"""The checksum of all tensors of a version. The learner and each engine compute it, to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def sum_of(sums: Mapping[str, str]) -> str:
    """Return the sha256, in hex, over the names and sha256 digests of all tensors, ordered by name."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(f"{name} {sums[name]}\n".encode())
    return digest.hexdigest()
