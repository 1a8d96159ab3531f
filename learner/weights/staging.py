"""Where the buckets of a version wait: in main memory, or on the GPU with a copy in main memory (`cuda.py`)."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol, cast

import torch

from learner.weights.buckets import PackedBucket
from protocol.weights import WeightBucket


class Staging(Protocol):
    """The buckets of one publisher. Called by the training thread."""

    deferred: bool
    """Reading a value of a tensor waits for all work before it: the weights are checked once, at the end."""

    def room(self) -> int:
        """Return the bytes of buckets that may be gathered before the engines pause, at the start of a version."""

    def copy(self, flat: torch.Tensor) -> Future[torch.Tensor]:
        """Return a bucket, [n] uint8, in main memory; done when it is complete there."""

    def close(self) -> None:
        """Stop threads."""


class HostStaging:
    """Buckets in main memory already: one is sent while the next is gathered, and none is copied."""

    deferred = False

    def room(self) -> int:
        """Return 0: engines that stage do not pause meanwhile."""
        return 0

    def copy(self, flat: torch.Tensor) -> Future[torch.Tensor]:
        """Return the same tensor."""
        done: Future[torch.Tensor] = Future()
        done.set_result(flat)
        return done

    def close(self) -> None:
        """Do nothing: there are no open resources."""


STAGING = {
    "gloo": "learner.weights.staging:HostStaging",
    "nccl": "learner.weights.cuda:CudaStaging",
}
"""Backend -> "module:Class" of its `Staging`."""


def staging_for(backend: str) -> Staging:
    """Return a new `Staging` for `backend`."""
    return cast("Staging", resolve_name(STAGING[backend])())


@dataclass(frozen=True)
class KeptBucket:
    """A bucket of the copy in main memory: [n] uint8, as soon as it is there."""

    bucket: WeightBucket
    flat: Future[torch.Tensor]

    def packed(self) -> PackedBucket:
        """Return it. Waits for the copy."""
        return PackedBucket(self.bucket, self.flat.result())
