"""The trainer's side of a distributed update: rank 0 of a gloo group, in a thread while the HTTP call runs."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contract_client import Client
from contract_engines import PATIENCE_S
from contract_models import read_weights

from learner.weights.process_group import BroadcastGroup, Rendezvous
from protocol.runtime.net import free_port

FLATTENED = "flattened_bucket"
Named = tuple[str, torch.Tensor]


@dataclass
class Trainer:
    """Rank 0 of a group of two, whose other rank is the engine."""

    client: Client
    name: str
    group: BroadcastGroup
    left: bool = False

    async def leave(self) -> None:
        """Leave the group, once."""
        if not self.left:
            self.left = True
            await asyncio.to_thread(self.group.close)

    async def send(self, bucket: Sequence[Named], load_format: str | None = None, **fields: Any) -> tuple[int, Any]:
        """One bucket: the call and the broadcasts at once."""
        call = asyncio.create_task(self.announce(bucket, load_format, **fields))
        await asyncio.gather(asyncio.to_thread(self.broadcast, bucket, load_format), call)
        return call.result()

    async def announce(self, bucket: Sequence[Named], load_format: str | None, **fields: Any) -> tuple[int, Any]:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.name,
            "load_format": load_format,
            **fields,
        }
        return await self.client.post("/update_weights_from_distributed", body)

    def broadcast(self, bucket: Sequence[Named], load_format: str | None) -> None:
        if load_format == FLATTENED:
            self.group.broadcast(torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket]))
            return
        for _, tensor in bucket:
            self.group.broadcast(tensor)


@contextlib.asynccontextmanager
async def trainer(client: Client, ranks: int = 1) -> AsyncIterator[Trainer]:
    """A trainer whose engine has joined; both have left when this is."""
    name, port = uuid.uuid4().hex, free_port("127.0.0.1")
    meeting = asyncio.to_thread(
        BroadcastGroup, Rendezvous(name, "127.0.0.1", port, ranks + 1, "gloo", PATIENCE_S, PATIENCE_S)
    )
    join = client.post(
        "/init_weights_update_group",
        {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": ranks + 1,
            "group_name": name,
            "backend": "gloo",
        },
    )
    group, (status, answer) = await asyncio.gather(meeting, join)
    assert status == 200 and answer["success"] is True, answer
    there = Trainer(client, name, group)
    try:
        yield there
    finally:
        await client.post("/end_weight_update", {})  # where a test left one open
        await client.post("/destroy_weights_update_group", {"group_name": name})
        await there.leave()


def buckets_of(path: Path, count: int = 3) -> list[list[Named]]:
    """All tensors of a model, in this many parts."""
    named = sorted(read_weights(path).items())
    return [named[i::count] for i in range(count)]
