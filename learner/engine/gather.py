"""Whole tensors out of the pieces that ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from learner.engine.partition import Partition

CHUNK_BYTES = 256 << 20
"""Tensors are gathered in chunks of so many bytes: one by one is ten times slower, all at once may not fit."""


def byte_chunks(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names, in order, in chunks of at most CHUNK_BYTES, or of one."""
    chunk: list[str] = []
    held = 0
    for name, size in sizes.items():
        if chunk and held + size > CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append(name)
        held += size
    if chunk:
        yield chunk


def whole_bytes(parameter: torch.nn.Parameter) -> int:
    """Size of a parameter; ZeRO-3 leaves an empty tensor behind and keeps the true size in ds_numel."""
    return int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()


def gathered(
    partition: Partition,
    kept: Mapping[int, torch.Tensor],
    device: torch.device,
    out: str,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole float32 tensor of its own on `out`) of the parameters that are `wanted` here; collective.

    kept    id of a flat master tensor -> what is asked for, shaped like it
    device  where ranks can talk to each other
    """
    alone = partition.whole or torch.distributed.get_world_size() == 1
    for names in byte_chunks({name: shape.numel() * 4 for name, shape in partition.shapes.items()}):
        places, end = {}, 0
        for name in names:
            places[name] = end
            end += partition.shapes[name].numel()
        # As integers: every number is one rank's and zero elsewhere, and so their sum has its very bits, -0.0 too.
        buffer = torch.zeros(end, dtype=torch.int32, device=device)
        for name in names:
            piece = partition.pieces.get(name)
            if piece is not None:
                place = buffer.narrow(0, places[name] + piece.start, piece.count)
                place.copy_(piece.of(kept[id(piece.flat)]).view(torch.int32))
        if not alone:
            torch.distributed.all_reduce(buffer)
        for name in names:
            if wanted(name):
                shape = partition.shapes[name]
                part = buffer.narrow(0, places[name], shape.numel()).view(torch.float32)
                yield name, part.reshape(shape).to(out, copy=True)
