"""The baseline of `foray bench weights`: one tensor from rank 0 to all others, with torch and gloo only.

    python -m benchmarks.raw_broadcast STORE RANK WORLD BYTES ROUNDS

Rank 0 prints the seconds of each round as a JSON list. A round ends when every rank has the bytes (barrier).
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta


def main(store: str, rank: int, world: int, num_bytes: int, rounds: int) -> None:
    """Run one rank; `store` is the path of a file that all ranks share."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    tensor = torch.full((num_bytes,), rank, dtype=torch.uint8)
    seconds = []
    for _ in range(rounds + 1):  # the first connects the ranks
        distributed.barrier()
        began = time.monotonic()
        distributed.broadcast(tensor, src=0)
        distributed.barrier()
        seconds.append(time.monotonic() - began)
    if rank == 0:
        print(json.dumps(seconds[1:]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
