"""Checksums of what the learner sends: one of each tensor of the policy, taken before packing.

They are compared with those of an engine that reports its tensors. For other engines (SGLang fuses and may shard
tensors) every bucket is checked: each tensor is read back from where the engine will read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Executor, Future

import torch

from learner.weights.base import PackingError
from learner.weights.buckets import PackedBucket
from protocol.weights import DIGESTS, sum_of


class SourceChecksums:
    """`dtypes`: torch's names of the engines' weight dtypes, independent of the policy's. `algorithm`: of DIGESTS."""

    def __init__(self, pool: Executor, dtypes: Iterable[str] = (), algorithm: str = "sha256") -> None:
        self._pool, self.algorithm = pool, algorithm
        self._own: dict[str, str] = {}
        self._of: dict[str, dict[str, str]] = {word: {} for word in dtypes if word}

    def add(self, name: str, tensor: torch.Tensor) -> Future[None]:
        """Compute the checksum of one tensor in the background, in its own dtype and in each engine's."""
        return self._pool.submit(self._add, name, tensor)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._own[name] = self._digest(tensor)
        for word, sums in self._of.items():
            dtype = getattr(torch, word)
            sums[name] = self._own[name] if dtype == tensor.dtype else self._digest(tensor.to(dtype))

    def total(self, dtype: str, unused: Collection[str]) -> str:
        """Return the sum over all tensors as in an engine of `dtype`, except those that it does not use."""
        sums = self._of.get(dtype, self._own)
        return sum_of({name: sums[name] for name in sums.keys() - set(unused)})

    def check(self, packed: PackedBucket) -> None:
        """Raise PackingError unless each tensor can be read back from the bucket."""
        for name, tensor in packed.tensors():
            if self._digest(tensor) != self._own[name]:
                raise PackingError(f"{name} in its bucket differs from the policy")

    def _digest(self, tensor: torch.Tensor) -> str:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        return DIGESTS[self.algorithm](plain.view(torch.uint8).numpy().data)
