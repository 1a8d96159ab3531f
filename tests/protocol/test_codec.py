"""Round trips, frozen bytes, and hostile input of the wire format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.arrays import Message
from protocol.errors import (
    CorruptMessage,
    InvalidBody,
    MessageTooLarge,
    ProtocolError,
    UnknownKind,
    UnsupportedVersion,
)
from protocol.messages import (
    EngineInfo,
    GroupFailed,
    MetricsSnapshot,
    NodeState,
    Segment,
    Status,
    TrajectoryGroup,
    ViewAnswer,
    WeightUpdate,
    WeightView,
)
from protocol.versions import PolicyVersion
from protocol.weights import WeightBucket, WeightPlan
from tests.support.messages import make_group, make_task, make_trajectory, policy_segment

GOLDEN = Path(__file__).parent.parent / "golden"

BUCKETS = (WeightBucket(names=("a", "b"), dtypes=("float32", "bfloat16"), shapes=((2, 3), ())),)
EXAMPLES: dict[str, Message] = {
    "task": make_task(7),
    "group": make_group(3, (1.0, 0.0), version=PolicyVersion(2, 41)),
    "failed": GroupFailed(run="test", seq=9, attempt=3, question_id="q9", reason="no_engine", detail="none for 60 s"),
    "weights": WeightUpdate(run="test", epoch=2, step=41, digest="ab" * 32, path="/run/weights/v2.41", num_bytes=8),
    "view": WeightView(
        run="test",
        epoch=2,
        step=41,
        number=3,
        phase="transfer",
        members=("e1/ab",),
        rank_offsets=(1,),
        group="test-2-3",
        address="127.0.0.1",
        port=29500,
        world_size=2,
        buckets=BUCKETS,
        deadline=1.5,
    ),
    "plan": WeightPlan(buckets=BUCKETS),
    "answer": ViewAnswer(member="e1/ab", number=3, phase="loaded", kind="cpu", checksum="cd", pause_s=0.25),
    "engine": EngineInfo(id="e1", url="http://127.0.0.1:1", state=NodeState.READY, epoch=2, step=41, tokenizer="cd"),
    "metrics": MetricsSnapshot(process="learner", id="l", uptime_s=1.5, values={"step": 3.0}, waits={"data": 0.25}),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_kind_survives_the_round_trip(kind: str) -> None:
    raw = codec.encode(EXAMPLES[kind])
    again = codec.decode(raw)
    assert type(again) is codec.KINDS[kind]
    assert codec.encode(again) == raw


@pytest.mark.parametrize("kind", EXAMPLES)
def test_bytes_are_those_of_the_golden_file(kind: str) -> None:
    # A change here breaks compatibility with running processes of the last release: see messages.py.
    frozen = (GOLDEN / f"v1.8-{kind}.msgpack").read_bytes()
    assert codec.encode(codec.decode(frozen)) == codec.encode(EXAMPLES[kind])
    assert frozen == codec.encode(EXAMPLES[kind])


@pytest.mark.parametrize(
    "path",
    sorted(path for minor in range(8) for path in GOLDEN.glob(f"v1.{minor}-*.msgpack")),
    ids=lambda path: path.stem,
)
@pytest.mark.fault(31, 52)
def test_what_an_older_minor_wrote_is_still_read_as_it_was_meant(path: Path) -> None:
    assert codec.encode(codec.decode(path.read_bytes())) == codec.encode(EXAMPLES[path.stem.split("-")[1]])


def test_every_kind_has_an_example_and_a_golden_file() -> None:
    assert set(EXAMPLES) == set(codec.KINDS) == {p.stem.split("-")[1] for p in GOLDEN.glob("v1.8-*.msgpack")}


def test_arrays_keep_dtype_shape_and_are_read_only() -> None:
    group = codec.decode_as(TrajectoryGroup, codec.encode(make_group()))
    trajectory = group.trajectories[0]
    assert trajectory.ids.dtype == np.int32 and trajectory.logprobs.dtype == np.float32
    assert trajectory.mask.tolist() == [False, False, False, True, True, False, False, False, True, True]
    with pytest.raises(ValueError, match="read-only"):
        trajectory.segments[0].ids[0] = 5


def test_messages_are_equal_if_their_arrays_are() -> None:
    assert make_group() == make_group() and make_group() == codec.decode(codec.encode(make_group()))
    assert make_group() != make_group(length=3)
    assert policy_segment([1, 2]) != policy_segment([1, 2], [-0.5, -0.25])


@pytest.mark.parametrize(
    "change",
    [
        {"ids": np.asarray([1.5])},
        {"ids": np.asarray([[1]])},
        {"ids": np.asarray([1 << 31])},
        {"ids": np.asarray([-1])},
        {"ids": "1"},
        {"logprobs": np.asarray([-1.0])},
        {"owner": "nobody"},
        {"query": "q" * ((1 << 20) + 1)},
        {"reward": float("nan")},
        {"latency_s": -1.0},
        {"passage_ids": ("p",) * 1001},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_segment_cannot_be_made_either(change: dict[str, Any]) -> None:
    assert Segment(**{"owner": "environment", "ids": np.asarray([1], np.int64)}).ids.dtype == np.int32
    with pytest.raises(ValueError, match=r".+"):
        Segment(**{"owner": "environment", "ids": np.asarray([1])} | change)


def test_an_array_of_another_dtype_is_not_written() -> None:
    trajectory = make_trajectory()
    wrong = trajectory.segments[0].model_copy(update={"ids": np.asarray([1, 2])})
    forged = trajectory.model_copy(update={"segments": (wrong,)})
    with pytest.raises(TypeError, match="int64"):
        codec.encode(make_group().model_copy(update={"trajectories": (forged,)}))


def _with_body(kind: str, change: dict[str, object]) -> bytes:
    envelope = msgpack.unpackb(codec.encode(EXAMPLES[kind]), raw=False)
    envelope["body"].update(change)
    return msgpack.packb(envelope, use_bin_type=True)


def _with_segment(change: dict[str, object]) -> bytes:
    envelope = msgpack.unpackb(codec.encode(EXAMPLES["group"]), raw=False)
    envelope["body"]["trajectories"][0]["segments"][1].update(change)
    return msgpack.packb(envelope, use_bin_type=True)


WRONG = (np.nan, -np.nan, np.inf, -np.inf, 0.5)
"""What no log-prob is."""


@pytest.mark.parametrize(
    "change",
    [
        {"ids": b"\x01\x02\x03"},
        {"ids": [1, 1 << 31]},
        {"ids": [1, "2"]},
        {"ids": [[1], [2]]},
        {"ids": "text"},
        {"ids": np.asarray([-1, 2], "<i4").tobytes()},
        {"ids": np.asarray([2, -1], "<i4").tobytes()},
        *({"logprobs": np.asarray(pair, "<f4").tobytes()} for wrong in WRONG for pair in ([wrong, -1], [-1, wrong])),
        {"logprobs": np.asarray([-1], "<f4").tobytes()},
        {"spans": []},
        {"spans": [{"epoch": 1, "step": 1, "start": 0, "end": 3}]},
        {"spans": [{"epoch": 1, "step": 1, "start": 1, "end": 2}]},
        {"spans": [{"epoch": 1, "step": 1, "start": 0, "end": 0}, {"epoch": 1, "step": 1, "start": 0, "end": 2}]},
        {"owner": "nobody"},
        {"latency_s": float("nan")},
        {"query": "q" * ((1 << 20) + 1)},
    ],
    ids=lambda change: next(iter(change)) + str(len(str(change)) % 97),
)
def test_a_wrong_segment_is_an_invalid_body(change: dict[str, object]) -> None:
    with pytest.raises(InvalidBody):
        codec.decode(_with_segment(change))


TASK = {"seq": 7, "question": {"id": "q", "text": "?"}, "group_size": 4}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sampling": {"temperature": 1}}, ""),  # an int where a float is meant: the only conversion
        ({"seq": 7.0}, "invalid_body"),
        ({"seq": "7"}, "invalid_body"),
        ({"seq": True}, "invalid_body"),
        ({"seq": 1 << 63}, "invalid_body"),
        ({"seq": None}, "invalid_body"),
        ({"sampling": {"top_p": "1"}}, "invalid_body"),
        ({"sampling": {"temperature": float("nan")}}, "invalid_body"),
        ({"question": {"id": b"q", "text": "?"}}, "invalid_body"),
        ({"question": {"id": "q"}}, "invalid_body"),
        ({"question": {"id": "q", "text": "?", "meta": {"a": [1]}}}, "invalid_body"),
        ({"question": {"id": "q", "text": "?", "meta": {str(n): n for n in range(65)}}}, "invalid_body"),
        ({"question": {"id": "q", "text": "?", "answers": [""] * 65537}}, "corrupt"),
        ({"question": {"id": "q", "text": b"\xff"}}, "invalid_body"),
        ({"question": {"id": "q", "text": "\udcff"}}, "corrupt"),
        ({7: 7}, "corrupt"),
        ({b"seq": 7}, "invalid_body"),
        ({"\udcff": 7}, ""),  # a field of another name is skipped unread
        ({"colour": [{"a": "\udcff"}]}, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_wrong_value_has_its_reason(change: dict[Any, Any], reason: str) -> None:
    body = {key: value for key, value in TASK.items() if key.encode() not in change} | change
    raw = msgpack.packb({"v": [1, 7], "kind": "task", "body": body}, unicode_errors="surrogateescape")
    try:
        found = ""
        codec.decode(raw)
    except ProtocolError as error:
        found = error.reason
    assert found == reason


def test_each_wrong_envelope_has_its_own_error() -> None:
    pack = lambda value: msgpack.packb(value, use_bin_type=True)  # noqa: E731
    good = codec.encode(EXAMPLES["task"])
    with pytest.raises(MessageTooLarge):
        codec.decode(good, max_bytes=len(good) - 1)
    with pytest.raises(CorruptMessage):
        codec.decode(good[:-1])
    with pytest.raises(CorruptMessage):
        codec.decode(good + b"\x00")
    with pytest.raises(CorruptMessage):
        codec.decode(pack([1, 2]))
    with pytest.raises(CorruptMessage):
        codec.decode(pack({"v": 1, "kind": "task", "body": {}}))
    with pytest.raises(UnknownKind):
        codec.decode(pack({"v": [1, 0], "kind": "nonsense", "body": {}}))
    with pytest.raises(UnknownKind):
        codec.decode(pack({"v": [1, 0], "kind": ["task"], "body": {}}))
    with pytest.raises(UnsupportedVersion, match="upgrade"):
        codec.decode(pack({"v": [2, 0], "kind": "task", "body": {}}))
    with pytest.raises(InvalidBody):
        codec.decode(pack({"v": [1, 0], "kind": "task", "body": None}))
    with pytest.raises(InvalidBody):
        codec.decode(_with_body("task", {"seq": -1}))
    with pytest.raises(InvalidBody):
        codec.decode(_with_body("group", {"trajectories": []}))


@pytest.mark.fault(31, 52)
def test_a_newer_minor_with_an_unknown_field_is_still_read() -> None:
    envelope = msgpack.unpackb(codec.encode(EXAMPLES["task"]), raw=False)
    envelope["v"], envelope["body"]["colour"] = [1, 7], "red"
    assert codec.decode(msgpack.packb(envelope, use_bin_type=True)) == EXAMPLES["task"]


def test_deep_nesting_and_bombs_are_refused_quickly() -> None:
    for bomb in (
        b"\x91" * 200_000 + b"\xc0",
        b"\x81\xa1a" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x80" * 5_000_000,
        b"",
    ):
        with pytest.raises(ProtocolError):
            codec.decode(bomb)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(EXAMPLES)), st.integers(0, 1 << 30), st.integers(0, 7), st.booleans())
def test_a_flipped_bit_or_a_cut_never_raises_anything_but_a_protocol_error(
    kind: str, position: int, bit: int, cut: bool
) -> None:
    raw = bytearray(codec.encode(EXAMPLES[kind]))
    position %= len(raw)
    if cut:
        raw = raw[:position]
    else:
        raw[position] ^= 1 << bit
    try:
        codec.decode(bytes(raw))
    except ProtocolError as error:
        assert error.reason


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_never_raise_anything_but_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(raw)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(list(Status)), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**31 - 1), max_size=30),
    st.integers(0, 5),
    st.integers(0, 1000),
)
def test_any_group_survives_the_round_trip(statuses: list[Status], ids: list[int], epoch: int, step: int) -> None:
    version = PolicyVersion(epoch, step)
    group = make_group().model_copy(
        update={"trajectories": tuple(make_trajectory(last=ids, status=s, version=version) for s in statuses)}
    )
    again = codec.decode_as(TrajectoryGroup, codec.encode(group))
    for before, after in zip(group.trajectories, again.trajectories, strict=True):
        assert after.status is before.status
        assert np.array_equal(after.ids, before.ids) and np.array_equal(after.mask, before.mask)
        assert np.array_equal(after.logprobs, before.logprobs) and np.array_equal(after.versions, before.versions)
