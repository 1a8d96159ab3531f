"""The process group that all engines of a process share."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, only not in __all__

from protocol.runtime.torch_safety import gloo_at, interface_variables

PATIENCE = timedelta(hours=1)
"""Timeout of a collective, long enough for other ranks to write files."""


def join_ranks() -> None:
    """Join the ranks that a launcher set in the environment, or form a single-rank group without port or MPI."""
    if torch.distributed.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        os.environ.update(interface_variables(master))
        with gloo_at(master):
            torch.distributed.init_process_group(backend, timeout=PATIENCE)
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asserts that it is set
    torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def leave_ranks() -> None:
    """Leave the process group; a no-op outside one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fail_together(failed: bool, device: torch.device) -> bool:
    """Return whether any rank failed; collective."""
    flag = torch.tensor([int(failed)], device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
