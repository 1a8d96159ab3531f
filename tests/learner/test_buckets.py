"""Buckets: everything is in one, none is too large, and an engine can cut each tensor out again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.weights.base import BadWeights
from learner.weights.buckets import LayoutMismatch, layout, num_bytes, pack, plan
from protocol.weights import WeightBucket

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64]


def tensors(sizes: list[tuple[int, int, int]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"t{i}", (torch.randn(rows, columns, generator=generator) * 9).to(DTYPES[kind]))
        for i, (rows, columns, kind) in enumerate(sizes)
    ]


def as_an_engine_cuts(bucket: WeightBucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """SGLang's FlattenedTensorBucket: offsets are the sums of the sizes, without padding; a slice is then viewed."""
    out, start = {}, 0
    for name, word, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, word)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        out[name] = flat[start:end].view(dtype).reshape(shape)
        start = end
    assert start == len(flat)
    return out


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, len(DTYPES) - 1)), min_size=1, max_size=20),
    st.integers(1, 400),
)
def test_every_tensor_arrives_bit_for_bit_in_a_bucket_of_bounded_size(
    sizes: list[tuple[int, int, int]], bucket_bytes: int
) -> None:
    named = tensors(sizes)
    planned = plan(layout(named), bucket_bytes)
    arrived: dict[str, torch.Tensor] = {}
    for packed in pack(planned, iter(named)):
        assert num_bytes(packed.bucket) <= bucket_bytes or len(packed.bucket.names) == 1
        arrived |= as_an_engine_cuts(packed.bucket, packed.flat)
        assert all(torch.equal(arrived[name], tensor) for name, tensor in packed.tensors())
    assert arrived.keys() == dict(named).keys()
    assert all(torch.equal(arrived[name], tensor) and arrived[name].dtype == tensor.dtype for name, tensor in named)


def test_a_bucket_is_gathered_only_when_requested() -> None:
    named = tensors([(4, 4, 0)] * 6)
    taken = []

    def weights():
        for name, tensor in named:
            taken.append(name)
            yield name, tensor

    packed = pack(plan(layout(named), 128), weights())
    assert taken == []
    next(packed)
    assert taken == ["t0", "t1"]
    next(packed)
    assert taken == ["t0", "t1", "t2", "t3"]


def test_tensors_that_were_not_planned_for_are_refused() -> None:
    named = tensors([(2, 2, 0), (3, 3, 0)])
    planned = plan(layout(named), 1 << 20)
    with pytest.raises(LayoutMismatch, match="missing"):
        list(pack(planned, iter(named[:1])))
    with pytest.raises(LayoutMismatch, match="t9"):
        list(pack(planned, iter([*named, ("t9", torch.ones(1))])))
    with pytest.raises(LayoutMismatch, match="t1"):
        list(pack(planned, iter([named[0], ("t1", torch.ones(3, 2))])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, bad: float) -> None:
    named = [("a", torch.ones(100)), ("b", torch.ones(7, 9, dtype=dtype))]
    named[1][1][6, 8] = bad
    with pytest.raises(BadWeights, match="tensor b"):
        list(pack(plan(layout(named), 1 << 20), iter(named)))
