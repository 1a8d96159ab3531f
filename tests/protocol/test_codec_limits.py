"""Limits of messages: the cost of hostile ones, and that the largest valid ones pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest

from protocol import codec
from protocol.errors import MessageTooLarge, ProtocolError
from protocol.header import read_header, seal
from protocol.messages import (
    EngineInfo,
    GroupFailed,
    MetricsSnapshot,
    NodeState,
    Question,
    Segment,
    Task,
    Trajectory,
    TrajectoryGroup,
    WeightView,
)
from protocol.weights import WeightBucket
from tests.support.messages import make_group, make_task, make_trajectory

MIB = 1 << 20
HOSTILE = {
    "maps": b"\x80",
    "maps of one": b"\x81\xa1a\xc0",
    "arrays": b"\x90",
    "texts": b"\xa2\xd7\x90",
    "short texts": b"\xa2ab",
    "bytes": b"\xc4\x02ab",
    "numbers": b"\xcd\x01\x01",
}


def arrays_of(element: bytes, size: int) -> bytes:
    """An array of arrays of 65535 times `element`."""
    inner = b"\xdc\xff\xff" + element * 65535
    count = size // len(inner)
    return b"\xdc" + count.to_bytes(2, "big") + inner * count


def grown_mb(work: Callable[[], object]) -> float:
    """By how much this process' memory grew at its peak during `work`, which ends in a ProtocolError."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    with pytest.raises(ProtocolError):
        work()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_message_takes_no_more_memory_than_its_values_may(what: str) -> None:
    raw = arrays_of(HOSTILE[what], 32 * MIB)
    assert grown_mb(lambda: codec.decode(raw)) < 160, f"{len(raw) >> 20} MiB of {what}"


def test_the_shortest_message_with_too_many_values_is_refused() -> None:
    """Its bytes are each an element and an empty array. Shorter messages are not counted, longer ones are."""
    assert len(codec.unpack(arrays_of(b"\x90", 7 * 65538))) == 7
    raw = arrays_of(b"\x90", 8 * 65538)
    assert len(raw) < 1.1 * codec.MAX_VALUES / 2
    with pytest.raises(MessageTooLarge, match="more than 1000000 values"):
        codec.unpack(raw)


def test_a_deep_message_takes_little_memory() -> None:
    raw = b"\xdc\xff\xff" * 10_000 + b"\xc0" * 65536
    assert grown_mb(lambda: codec.decode(raw)) < 160


@pytest.mark.parametrize("kind", ["task", "failed", "weights", "answer", "engine", "metrics"])
def test_a_small_kind_is_refused_before_it_is_unpacked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "unpack", lambda raw: pytest.fail("it was unpacked"))
    with pytest.raises(MessageTooLarge, match="exceed the limit of 1048576"):
        codec.decode_as(codec.KINDS[kind], bytes(MIB + 1))


def test_a_message_of_another_kind_has_its_own_limit() -> None:
    envelope = {"v": [1, 0], "kind": "task", "body": {"x": bytes(MIB)}}
    with pytest.raises(MessageTooLarge, match="a task of"):
        codec.decode_as(TrajectoryGroup, msgpack.packb(envelope))
    with pytest.raises(ProtocolError, match="a header of"):
        read_header(bytes(MIB + 1))


def test_who_writes_finds_out_what_no_reader_would_take() -> None:
    long = Question(id="q", text="a" * MIB, answers=("b",))
    with pytest.raises(MessageTooLarge, match="a task of"):
        codec.encode(make_task(1).model_copy(update={"question": long}))
    turns = make_trajectory().segments
    many = tuple(Trajectory(status="answered", segments=turns * 8) for _ in range(2000))
    with pytest.raises(MessageTooLarge, match="values"):
        codec.encode(make_group().model_copy(update={"trajectories": many}))


def _turns(count: int, tokens: int) -> tuple[Segment, ...]:
    """`count` segments: a prompt, then turns and observations by turns, of `tokens` tokens each."""
    prompt, policy, observation, _ = make_trajectory(first=range(tokens), observation=range(tokens)).segments
    observation = observation.model_copy(update={"passage_ids": tuple(f"p{n}" for n in range(10))})
    return (prompt, *([policy, observation] * (count // 2)))[:count]


@pytest.mark.parametrize(
    ("size", "segments", "tokens"),
    [(8, 9, 4000), (512, 33, 20), (8, 1023, 100), (4096, 5, 8)],
    ids=["long turns", "many attempts", "many turns", "the largest group"],
)
def test_the_largest_groups_pass(size: int, segments: int, tokens: int) -> None:
    trajectory = Trajectory(status="answered", segments=_turns(segments, tokens), reward=1.0, rewards={"em": 1.0})
    group = make_group().model_copy(update={"trajectories": (trajectory,) * size})
    header, body = seal(group)
    again = codec.decode_as(TrajectoryGroup, body)
    assert len(again.trajectories) == size and np.array_equal(again.trajectories[-1].ids, trajectory.ids)
    assert len(read_header(header).lengths) == size


def test_the_largest_messages_of_other_kinds_pass() -> None:
    question = Question(id="q", text="a" * 900_000, answers=("b",) * 1000, meta={"m": "c"})
    values = {f"{'m' * 200}{n}": float(n) for n in range(1024)}
    names = tuple(f"model.layers.{n // 400}.mlp.experts.{n % 400}.down_proj.weight" for n in range(40_000))
    bucket = WeightBucket(names=names, dtypes=("bfloat16",) * len(names), shapes=((7168, 2048),) * len(names))
    view = WeightView(
        **{"run": "r", "epoch": 1, "step": 1, "number": 1, "phase": "transfer", "members": ("e/1",)},
        **{"rank_offsets": (1,), "group": "g", "address": "a", "port": 1, "world_size": 2, "buckets": (bucket,)},
    )
    for message in (
        Task(seq=(1 << 62) - 1, question=question, group_size=4096),
        GroupFailed(run="r", seq=1, attempt=1, reason="x", detail="d" * 1_000_000),
        EngineInfo(id="e", url="u", state=NodeState.READY, detail="d" * 2000),
        MetricsSnapshot(process="p", id="i", values=values, text={"t": "x" * 100_000}),
        view,
    ):
        assert codec.decode_as(type(message), codec.encode(message)) == message
