"""The baselines of `foray bench weights`: bytes from rank 0 to all others, with torch and gloo only.

    python -m benchmarks.raw_broadcast STORE RANK WORLD BYTES ROUNDS CHECKSUM

Rank 0 prints the seconds of each round as a JSON list. A round ends when every rank has the bytes (barrier). CHECKSUM
none: one broadcast into the tensor of each rank. Otherwise one of `protocol.weights.DIGESTS`, with which each rank
also does what an update of weights in use cannot do without. Rank 0 copies into its send buffer, the others out of
their receive buffer, and each compares the checksum of what it stored with that of the source; in pieces, with a second
thread that hashes.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from protocol.weights import DIGESTS

if TYPE_CHECKING:
    import torch

PIECES = 8
"""As many buckets as Foray makes of a small model."""


def main(store: str, rank: int, world: int, num_bytes: int, rounds: int, checksum: str) -> None:
    """Run one rank; `store` is the path of a file that all ranks share."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    tensor, stored = (torch.full((num_bytes,), rank, dtype=torch.uint8) for _ in range(2))
    seconds = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(rounds + 1):  # the first connects the ranks
            distributed.barrier()
            began = time.monotonic()
            if checksum != "none":
                _checked(rank, tensor, stored, pool, checksum)
            else:
                distributed.broadcast(tensor, src=0)
            distributed.barrier()
            seconds.append(time.monotonic() - began)
    if rank == 0:
        print(json.dumps(seconds[1:]))
    distributed.destroy_process_group()


def _checked(rank: int, tensor: torch.Tensor, stored: torch.Tensor, pool: Executor, checksum: str) -> None:
    """Send `tensor` of rank 0 into `stored` of the others. Raises RuntimeError if a rank stored other bytes."""
    import torch
    from torch import distributed

    hashes = []
    digest = partial(_digest, checksum)
    for given, kept in zip(tensor.chunk(PIECES), stored.chunk(PIECES), strict=True):
        if rank == 0:
            hashes.append(pool.submit(digest, given))
            kept.copy_(given)
            distributed.broadcast(kept, src=0)
        else:
            distributed.broadcast(given, src=0)
            kept.copy_(given)
            hashes.append(pool.submit(digest, kept))
    own = torch.frombuffer(bytearray(b"".join(one.result() for one in hashes)), dtype=torch.uint8)
    source = own.clone()
    distributed.broadcast(source, src=0)
    if not torch.equal(own, source):
        raise RuntimeError(f"rank {rank} stored other bytes")


def _digest(checksum: str, tensor: torch.Tensor) -> bytes:
    return bytes.fromhex(DIGESTS[checksum](tensor.numpy().data))


if __name__ == "__main__":
    rank, world, num_bytes, rounds = map(int, sys.argv[2:6])
    main(sys.argv[1], rank, world, num_bytes, rounds, sys.argv[6])
