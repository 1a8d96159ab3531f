"""Checksums of the tensors of a version. The learner and each engine compute them, to compare.

sha256    cannot be forged: for files, which others may write to, and for members that are not authenticated
xxh3_128  takes a sixth of the time. Finds faults (a flipped bit, a tensor in the place of another), not an attacker,
          who can make other bytes with the same checksum
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import xxhash

DIGESTS: Mapping[str, Callable[[memoryview], str]] = {
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "xxh3_128": xxhash.xxh3_128_hexdigest,
}
"""Algorithm -> the checksum of bytes, in hex."""


def refusal(algorithm: str) -> str:
    """Return why checksums by `algorithm` cannot be computed, and what to do; "" if they can."""
    if algorithm in DIGESTS:
        return ""
    known = ", ".join(DIGESTS)
    return (
        f"unknown checksum {algorithm[:80]!r}, known are {known}: install the learner's version of Foray on this host, "
        "or set learner.publish.checksum=sha256"
    )


def sum_of(sums: Mapping[str, str]) -> str:
    """Return the sha256, in hex, over the names and checksums of all tensors, ordered by name."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(f"{name} {sums[name]}\n".encode())
    return digest.hexdigest()
