"""One sum over the tensors of a version: the learner takes it of what it has, an engine of what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def sum_of(sums: Mapping[str, str]) -> str:
    """sha256 hex over the names and the sha256 of each tensor, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(f"{name} {sums[name]}\n".encode())
    return digest.hexdigest()
