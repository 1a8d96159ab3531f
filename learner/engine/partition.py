"""Locations of each parameter's float32 master weights and optimiser state on this rank.

DeepSpeed keeps them in flat tensors: at stage 0 the parameter itself, at stages 1 and 2 one flat partition for each
group of parameters, at stage 3 one for each sub-group, with a padded part of every parameter in it. torch's AdamW
keeps its moments in flat tensors of the same shape. This module represents all of it as pieces of one kind, so that
state has the same names and shapes at every stage and for any number of ranks.

DeepSpeed's own `safe_get_full_*` do the same for one parameter at a time, at stages 1 to 3, only after a first step,
and add zeros to the values, which turns -0.0 into 0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
EMA = "ema"
MASTER = "master"
CHUNK_BYTES = 256 << 20
"""Tensors are gathered in chunks of this many bytes: single tensors are ten times slower, all together may not fit."""


@dataclass(frozen=True)
class Piece:
    """`count` elements of a parameter from `start`, stored in `flat` from `offset`."""

    flat: torch.Tensor
    offset: int
    start: int
    count: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the piece in `tensor`, which is shaped like `flat`."""
        return tensor.detach().reshape(-1).narrow(0, self.offset, self.count)

    def put(self, tensor: torch.Tensor, values: torch.Tensor, begin: int) -> None:
        """Write this piece into `tensor`, which is shaped like `flat`. values [n]: the parameter's from `begin` on."""
        own = values.narrow(0, self.start - begin, self.count)
        if tensor.numel() == self.count:
            tensor.copy_(own.reshape(tensor.shape))
        else:
            self.of(tensor).copy_(own)


@dataclass(frozen=True)
class Partition:
    """This rank's part of the optimised parameters.

    parameters  name -> parameter, for all optimised parameters, in the module's order
    shapes      name -> shape of the whole parameter
    pieces      name -> its pieces on this rank, absent if there are none
    ranges      of every rank: name -> (start, count) of its piece
    groups      flat tensors of this rank with the names of their parameters
    whole       every rank holds every parameter whole (stage 0)
    """

    parameters: dict[str, torch.nn.Parameter]
    shapes: dict[str, torch.Size]
    pieces: dict[str, Piece]
    ranges: list[dict[str, tuple[int, int]]]
    groups: list[tuple[torch.Tensor, list[str]]]
    whole: bool


def partition_of(module: torch.nn.Module, optimizer: Any, stage: int, device: torch.device) -> Partition:
    """Read the partition from DeepSpeed's wrapped `optimizer` (at stage 0 the plain one); collective.

    device  for communication between ranks
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    shapes = {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
    names = {id(p): name for name, p in parameters.items()}
    if stage == 0:
        pieces = {name: Piece(p, 0, 0, p.numel()) for name, p in parameters.items()}
        return Partition(parameters, shapes, pieces, [], [(p, [name]) for name, p in parameters.items()], whole=True)
    if stage == 3:
        flats, members = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups
        pieces = dict(_scattered(parameters, optimizer))
    else:
        # with bfloat16 at stage 1 DeepSpeed uses another class, with other attribute names
        low = optimizer.bit16_groups if hasattr(optimizer, "bit16_groups") else optimizer.bf16_groups
        members, flats = low, [group["params"][0] for group in optimizer.optimizer.param_groups]
        pieces = dict(_mapped(parameters, flats))
    groups = [(flat, [names[id(p)] for p in ps]) for flat, ps in zip(flats, members, strict=True)]
    ranges = _ranges_of_all(list(parameters), pieces, device)
    return Partition(parameters, shapes, pieces, ranges, groups, whole=False)


def _ranges_of_all(
    names: list[str], pieces: Mapping[str, Piece], device: torch.device
) -> list[dict[str, tuple[int, int]]]:
    """Return name -> (start, count) of the pieces of every rank; collective. `names`: in the order of all ranks."""
    own = [(pieces[name].start, pieces[name].count) if name in pieces else (0, 0) for name in names]
    tensor = torch.tensor(own, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, tensor)
    rows = (zip(names, ranges.tolist(), strict=True) for ranges in everyone)
    return [{name: (start, count) for name, (start, count) in row if count} for row in rows]


def _mapped(parameters: dict[str, torch.nn.Parameter], flats: Sequence[torch.Tensor]) -> Iterator[tuple[str, Piece]]:
    for name, parameter in parameters.items():
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield name, Piece(flats[mapping.param_group_index], high.start, low.start, low.numel)


def _scattered(parameters: dict[str, torch.nn.Parameter], optimizer: Any) -> Iterator[tuple[str, Piece]]:
    rank = torch.distributed.get_rank()
    for name, parameter in parameters.items():
        group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * padded
        count = min(padded, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if count > 0:
            yield name, Piece(optimizer.fp32_partitioned_groups_flat[group], offset, start, count)


def low_range(partition: Partition, name: str) -> tuple[int, int]:
    """Return which elements of a parameter `set_low` needs on this rank: all, or at stage 3 this rank's share."""
    parameter, count = partition.parameters[name], partition.shapes[name].numel()
    if not hasattr(parameter, "ds_tensor") or parameter.data.numel() == count:  # whole at present
        return 0, count
    begin = torch.distributed.get_rank() * parameter.ds_tensor.ds_numel
    return begin, min(begin + parameter.ds_tensor.ds_numel, count)


def set_low(partition: Partition, name: str, values: torch.Tensor, begin: int) -> None:
    """Set the parameter of the forward pass to `values` [n], those of `low_range` from `begin` on.

    They are cast as DeepSpeed casts its master weights.
    """
    parameter = partition.parameters[name]
    if hasattr(parameter, "ds_tensor"):
        part = parameter.ds_tensor
        start = torch.distributed.get_rank() * part.ds_numel
        own = values[start - begin :][: part.ds_numel]
        part.data.reshape(-1)[: len(own)].copy_(own)
        if parameter.data.numel() != parameter.ds_numel:  # type: ignore[attr-defined]  # not whole at present
            return
    parameter.data.copy_(values.reshape(parameter.shape))


def byte_chunks(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield names, in order, in chunks of at most CHUNK_BYTES or a single name."""
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
    """Return the size of a parameter in bytes; ZeRO-3 leaves an empty tensor behind and keeps the true size in
    ds_numel."""
    return int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()


def gathered(
    partition: Partition,
    kept: Mapping[int, torch.Tensor],
    device: torch.device,
    owner: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole float32 tensor, to be copied before the next) of every parameter; collective.

    With an `owner` for each name, a rank gets only its own: of P bytes each of R ranks then sends and receives
    O(P / R), otherwise O(P).

    kept    id of a flat master tensor -> requested state, of the same shape
    device  device for communication between ranks
    """
    rank = torch.distributed.get_rank()

    def wanted(names: Iterable[str], by: int) -> list[str]:
        return [name for name in names if owner is None or owner[name] == by]

    if partition.whole or len(partition.ranges) == 1:
        for name in wanted(partition.pieces, rank):
            whole = partition.pieces[name]
            yield name, whole.of(kept[id(whole.flat)]).reshape(partition.shapes[name])
        return
    for names in byte_chunks({name: shape.numel() * 4 for name, shape in partition.shapes.items()}):
        own, mine = wanted(names, rank), partition.ranges[rank]
        sent = [[name for name in wanted(names, by) if name in mine] for by in range(len(partition.ranges))]
        received = [[(name, *ranges[name]) for name in own if name in ranges] for ranges in partition.ranges]
        sizes = [sum(count for _, _, count in part) for part in received]
        buffer = torch.empty(sum(sizes), device=device)
        pieces = [partition.pieces[name] for name in chain(*sent)]
        given = [torch.empty(0, device=device), *(piece.of(kept[id(piece.flat)]).to(device) for piece in pieces)]
        counts = [sum(mine[name][1] for name in part) for part in sent]
        torch.distributed.all_to_all_single(buffer, torch.cat(given), sizes, counts)
        wholes = {name: torch.empty(partition.shapes[name].numel(), device=device) for name in own}
        arrived = iter(torch.split(buffer, [count for part in received for _, _, count in part]))
        for name, start, count in chain(*received):
            wholes[name][start : start + count] = next(arrived)
        yield from ((name, whole.reshape(partition.shapes[name])) for name, whole in wholes.items())
