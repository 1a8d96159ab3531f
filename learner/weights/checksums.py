"""What the learner sends, in numbers: the sha256 of each tensor as the policy has it, taken before it is packed.

An engine that says what it holds, tensor by tensor, is compared with them. For one that does not (SGLang has fused and
perhaps cut the tensors), at least every bucket is: each tensor is read back from where the engine will read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from concurrent.futures import Executor, Future

import torch

from learner.weights.buckets import PackedBucket
from protocol.errors import ForayError
from protocol.weight_sums import sum_of


class PackingError(ForayError):
    """A bucket does not hold the tensors that it was made of."""


class SourceChecksums:
    """`dtypes`: torch's words for those that engines hold their weights in, whatever the policy's own are."""

    def __init__(self, pool: Executor, dtypes: Iterable[str] = ()) -> None:
        self._pool = pool
        self._own: dict[str, str] = {}
        self._of: dict[str, dict[str, str]] = {word: {} for word in dtypes if word}

    def add(self, name: str, tensor: torch.Tensor) -> Future[None]:
        """Take the sum of one tensor, in its own dtype and as each engine will hold it, while others look at it."""
        return self._pool.submit(self._add, name, tensor)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._own[name] = _sha256(tensor)
        for word, sums in self._of.items():
            dtype = getattr(torch, word)
            sums[name] = self._own[name] if dtype == tensor.dtype else _sha256(tensor.to(dtype))

    def total(self, dtype: str, unused: Collection[str]) -> str:
        """Return the sum over all tensors as an engine of `dtype` holds them, but for those that it has no use for."""
        sums = self._of.get(dtype, self._own)
        return sum_of({name: sums[name] for name in sums.keys() - set(unused)})

    def check(self, packed: PackedBucket) -> None:
        """Raise PackingError unless each tensor can be read back from the bucket."""
        for name, tensor in packed.tensors():
            if _sha256(tensor) != self._own[name]:
                raise PackingError(f"{name} is not in its bucket as the policy has it")


def _sha256(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().data).hexdigest()
