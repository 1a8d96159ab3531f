"""Length bucketing: which texts share a forward pass, and how far they are padded.

A text is padded to its own length rounded up to a multiple of 8 (what tensor cores like), at least 16, and only texts
with the same padded length share a batch: the padding of a text then depends on nothing but the text. Measured on a
6-layer MiniLM in float32 with one thread, vectors are then the same to the bit whatever else is in the batch (matrices
of fewer than 16 rows are multiplied in another way). With several threads or on a GPU the work may be cut otherwise for
another number of rows, and the last bits move (at most 2e-7 with 2 threads).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MULTIPLE, LEAST = 8, 16


def padded_length(length: int, limit: int) -> int:
    """The next multiple of MULTIPLE, LEAST at least, but not beyond `limit` (the model may have no positions there)."""
    return min(max(-(-length // MULTIPLE) * MULTIPLE, LEAST), max(limit, length))


def batches(lengths: Sequence[int], limit: int, budget: int) -> Iterator[tuple[list[int], int]]:
    """(positions in `lengths`, padded length) of every batch, longest first, so that memory runs out early or never.

    limit   longest input in tokens
    budget  most padded tokens in a batch; a single text may be longer
    """
    buckets: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        buckets.setdefault(padded_length(length, limit), []).append(position)
    for padded in sorted(buckets, reverse=True):
        rows = max(1, budget // padded)
        members = buckets[padded]
        for start in range(0, len(members), rows):
            yield members[start : start + rows], padded
