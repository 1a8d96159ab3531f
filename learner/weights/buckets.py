"""Pack tensors into flat buckets for transfer, and read them back.

An engine splits a flattened bucket at the sums of the preceding tensor sizes and reads each slice in the tensor's own
dtype, which must begin at a multiple of its width. There is no padding on the wire, so within a bucket wide dtypes come
before narrow ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from learner.weights.checks import WeightCheck
from protocol.errors import ForayError
from protocol.weights import WeightBucket

Named = tuple[str, torch.Tensor]


class LayoutMismatch(ForayError):
    """The tensors differ from the plan."""


@dataclass(frozen=True)
class PackedBucket:
    """One bucket: `flat` is [num_bytes] uint8, its tensors concatenated."""

    bucket: WeightBucket
    flat: torch.Tensor

    def tensors(self) -> Iterator[Named]:
        """(name, view into `flat`) in the bucket's order."""
        start = 0
        for name, dtype, shape in zip(self.bucket.names, self.bucket.dtypes, self.bucket.shapes, strict=True):
            end = start + _num_bytes(dtype, shape)
            yield name, self.flat[start:end].view(_dtype(dtype)).view(shape)
            start = end


def layout(named: Iterable[Named]) -> WeightBucket:
    """Return names, dtypes and shapes of `named`, in its order."""
    names, dtypes, shapes = [], [], []
    for name, tensor in named:
        names.append(name)
        dtypes.append(str(tensor.dtype).removeprefix("torch."))
        shapes.append(tuple(tensor.shape))
    return WeightBucket(names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(shapes))


def plan(whole: WeightBucket, bucket_bytes: int) -> tuple[WeightBucket, ...]:
    """Split `whole` into buckets of at most `bucket_bytes` (a larger tensor is alone), each with wide dtypes first."""
    runs: list[list[tuple[str, str, tuple[int, ...]]]] = []
    held = 0
    for part in zip(whole.names, whole.dtypes, whole.shapes, strict=True):
        size = _num_bytes(part[1], part[2])
        if not runs or held + size > bucket_bytes:
            runs.append([])
            held = 0
        runs[-1].append(part)
        held += size
    out = []
    for run in runs:
        run.sort(key=lambda part: -_dtype(part[1]).itemsize)  # stable
        names, dtypes, shapes = zip(*run, strict=True)
        out.append(WeightBucket(names=names, dtypes=dtypes, shapes=shapes))
    return tuple(out)


def num_bytes(bucket: WeightBucket) -> int:
    """Return the size of the flattened bucket in bytes."""
    return sum(_num_bytes(d, s) for d, s in zip(bucket.dtypes, bucket.shapes, strict=True))


def pack(
    planned: Iterable[WeightBucket],
    weights: Iterator[Named],
    inspection: WeightCheck | None = None,
    seen: Callable[[str, torch.Tensor], Future[None]] | None = None,
) -> Iterator[PackedBucket]:
    """Yield `weights` in the planned buckets, each as soon as its last tensor arrives.

    Takes from `weights` only what the next bucket needs. Raises LayoutMismatch if names, dtypes or shapes differ from
    the plan's, and BadWeights for a tensor that fails the inspection (default: all values finite). A deferred one
    raises that and PackingError after the last bucket.
    seen: receives each tensor as it arrives, which stays valid until its future is done.
    """
    inspection = inspection or WeightCheck({}, 0.0)
    for bucket in planned:
        wanted = dict(zip(bucket.names, zip(bucket.dtypes, bucket.shapes, strict=True), strict=True))
        flat: torch.Tensor | None = None
        starts = dict(zip(bucket.names, _starts(bucket), strict=True))
        while wanted:
            name, tensor = next(weights, ("", None))
            if tensor is None or wanted.pop(name, None) != (
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
            ):
                raise LayoutMismatch(f"tensor {name!r} differs from the plan" if name else "tensors are missing")
            seeing = seen(name, tensor) if seen else None
            inspection.add(name, tensor)
            if flat is None:
                flat = torch.empty(num_bytes(bucket), dtype=torch.uint8, device=tensor.device)
            start, size = starts[name], tensor.numel() * tensor.element_size()
            flat[start : start + size].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            if seeing:
                seeing.result()
        if flat is not None:
            packed = PackedBucket(bucket, flat)
            inspection.compare(packed.tensors())
            yield packed
    inspection.finish()
    if (extra := next(weights, None)) is not None:
        raise LayoutMismatch(f"tensor {extra[0]!r} is not in the plan")


def _starts(bucket: WeightBucket) -> list[int]:
    out, at = [], 0
    for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
        out.append(at)
        at += _num_bytes(dtype, shape)
    return out


def _dtype(word: str) -> torch.dtype:
    found = getattr(torch, word, None)
    if not isinstance(found, torch.dtype):
        raise LayoutMismatch(f"unknown dtype {word!r}")
    return found


def _num_bytes(dtype: str, shape: Iterable[int]) -> int:
    return math.prod(shape) * _dtype(dtype).itemsize
