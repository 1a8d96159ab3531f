"""Conversations as token ids: their order, and their packing into micro-batches. Deterministic; imports numpy only."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from learner.config.learner import BatchSettings
from learner.data.batch import IntArray
from learner.data.packing import layouts, place_rows


@dataclass(frozen=True)
class SftExample:
    """One conversation.

    ids      [L] int64
    trained  [T] int64, positions of the tokens that the policy should write, ascending, none of them 0
    key      what it is about, usually the question: decides whether it is held out
    """

    ids: IntArray
    trained: IntArray
    key: str

    @classmethod
    def of(cls, ids: Sequence[int], mask: Sequence[bool], key: str) -> SftExample:
        """Return the example. The first token is not trained: nothing predicts it."""
        trained = np.flatnonzero(np.asarray(mask, np.bool_))
        return cls(np.asarray(ids, np.int64), trained[trained > 0].astype(np.int64), key)

    @property
    def inputs(self) -> IntArray:
        """Return the tokens that are read: none from the last trained one on, because attention is causal."""
        return self.ids[: self.trained[-1]]


def held_out(example: SftExample, share: float) -> bool:
    """Return whether an example belongs to the held-out share. Examples with one key stay together."""
    digest = hashlib.sha256(example.key.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2.0**64


def num_updates(examples: int, batch_size: int, epochs: int, max_steps: int) -> int:
    """Return the number of updates of a whole training."""
    every = -(-examples // batch_size) * epochs
    return min(every, max_steps) if max_steps else every


def examples_of_update(update: int, examples: int, batch_size: int, seed: int) -> list[int]:
    """Return the numbers of the examples of update number `update` (from 0). The last of an epoch may have fewer."""
    epoch, place = divmod(update, -(-examples // batch_size))
    order = list(range(examples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[place * batch_size : (place + 1) * batch_size]


@dataclass(frozen=True)
class SftMicroBatch:
    """One forward pass; fields as in `learner.data.batch.MicroBatch`. tokens: number of tokens without padding."""

    ids: IntArray
    positions: IntArray
    document_ids: IntArray
    index: IntArray
    targets: IntArray
    tokens: int


def micro_batches(examples: Sequence[SftExample], settings: BatchSettings) -> Iterator[SftMicroBatch]:
    """Yield the micro-batches of these examples, each with at most `micro_batch_tokens` or one example."""
    lengths = [len(example.inputs) for example in examples]
    capacity = max(settings.row_tokens, *lengths) if settings.row_tokens else 0
    (layout,) = layouts(lengths, 1, capacity, settings.micro_batch_tokens)
    for rows in layout:
        placed = place_rows([[examples[i].inputs for i in row] for row in rows])
        parts = [examples[i] for row in rows for i in row]
        yield SftMicroBatch(
            placed.ids,
            placed.positions,
            placed.document_ids,
            index=np.concatenate([start + e.trained - 1 for start, e in zip(placed.starts, parts, strict=True)]),
            targets=np.concatenate([e.ids[e.trained] for e in parts]),
            tokens=sum(len(e.inputs) for e in parts),
        )
