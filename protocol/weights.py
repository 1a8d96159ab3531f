"""The tensors of a version: the buckets of a broadcast, and checksums, which learner and engines compare.

sha256    cannot be forged: for files, which others may write to, and for members that are not authenticated
xxh3_128  takes a sixth of the time. Finds faults (a flipped bit, a tensor in the place of another), not an attacker,
          who can make other bytes with the same checksum
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated

import xxhash
from msgspec import Meta

from protocol.arrays import MAX_ITEMS, Count, Message, Name


class WeightBucket(Message, frozen=True, kw_only=True):
    """Tensors sent in one broadcast: their bytes concatenated in this order, each aligned to its dtype.

    Names are those of Hugging Face, dtypes those of torch (e.g. "bfloat16"), with one shape per tensor.
    """

    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_ITEMS)]
    dtypes: Annotated[tuple[Name, ...], Meta(max_length=MAX_ITEMS)]
    shapes: Annotated[tuple[tuple[Count, ...], ...], Meta(max_length=MAX_ITEMS)]


class WeightPlan(Message, frozen=True, kw_only=True):
    """The buckets of a version, in the order of their broadcasts."""

    buckets: Annotated[tuple[WeightBucket, ...], Meta(max_length=MAX_ITEMS)]


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
