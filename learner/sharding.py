"""A module that only scores, cut over the ranks: each holds its share of every parameter, whole layers for a moment.

ZeRO stage 3 says that a model does not fit on one device; a reference whole on every rank would undo that. torch's
`fully_shard` is used, not a second DeepSpeed engine, since nothing is optimised here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: torch.nn.Module, device: torch.device) -> None:
    """Cuts `module` in place over all ranks, layer by layer; its forward pass is collective from now on."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    module.to(device)
    for layers in [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    # The rest (embedding, last norm, output layer) is the module's own; by default it would stay whole once used.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


@torch.no_grad()
def fill(module: torch.nn.Module, state: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies whole tensors into the parameters of these names, rounded to their dtype, or this rank's share of them.

    Names that `module` has not are passed over (a value head's). Nothing is communicated.
    """
    parameters = dict(module.named_parameters())
    for name, tensor in state:
        own = parameters.get(name)
        if isinstance(own, DTensor):
            there = tensor.to(own.device)
            share = distribute_tensor(there, own.device_mesh, own.placements, src_data_rank=None)
            own.to_local().copy_(share.to_local())
        elif own is not None:
            own.copy_(tensor)
