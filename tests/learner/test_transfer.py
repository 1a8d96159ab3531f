"""The end of a transfer: what members say that they hold is compared with the policy's tensors and with each other.

The nodes are scripted here; `test_publish_distributed.py` has the same with real engines over gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from learner.config.learner import DistributedPublishSettings
from learner.weights.buckets import PackedBucket, layout
from learner.weights.checksums import SourceChecksums
from learner.weights.process_group import GroupSender
from learner.weights.transfer import Transfer, TransferFailed, TransferLimits
from protocol.messages import NodeState, ViewAnswer, WeightView
from protocol.runtime.http.auth import Access, member_token

NAMED = [("a", torch.arange(6, dtype=torch.float32)), ("b", torch.ones(4, dtype=torch.float32))]


class EngineLink:
    """Members that answer every phase at once: with "prepared", then with `loaded`."""

    def __init__(self, loaded: Mapping[str, Mapping[str, Any]]) -> None:
        self._loaded, self._phase = loaded, ""

    def now(self) -> float:
        return 0.0

    def engines(self) -> list[Any]:
        ids = (member.split("/") for member in self._loaded)
        return [SimpleNamespace(id=id_, incarnation=life, state=NodeState.READY) for id_, life in ids]

    def view(self, view: WeightView, ttl_s: float, plan: bytes = b"") -> None:
        self._phase = view.phase

    def next_answers(self, epoch: int, number: int, after: str, wait_s: float) -> tuple[dict[str, ViewAnswer], str]:
        return self.answers(epoch, number), after

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        if self._phase == "prepare":
            tokens = {m: str(said.get("token", "")) for m, said in self._loaded.items()}
            return {m: ViewAnswer(member=m, number=number, phase="prepared", token=t) for m, t in tokens.items()}
        return {m: ViewAnswer(member=m, number=number, phase="loaded", **said) for m, said in self._loaded.items()}


class Sent:
    """A sender whose group is there and takes everything."""

    def __init__(self) -> None:
        self.joined = self.send([])

    def send(self, tensors: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


def transfer(loaded: Mapping[str, Mapping[str, Any]], access: Access | None = None) -> None:
    """Send NAMED to members that answer as `loaded` says."""
    bucket = layout(NAMED)
    flat = torch.cat([tensor.view(torch.uint8) for _, tensor in NAMED])
    view = WeightView(
        run="t", epoch=1, step=1, number=1, phase="prepare", members=tuple(loaded), buckets=(bucket,),
        rank_offsets=tuple(range(1, len(loaded) + 1)), group="g", address="127.0.0.1", port=1, world_size=2,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        sums = SourceChecksums(pool)
        for name, tensor in NAMED:
            sums.add(name, tensor).result()
        made = Transfer(
            cast(Any, EngineLink(loaded)),
            cast(GroupSender, Sent()),
            view,
            sums,
            dict.fromkeys(loaded, "float32"),
            access=access,
        )
        made.run(iter([PackedBucket(bucket, flat)]), prepare_s=30, transfer_s=30, stall_s=30)


def right() -> str:
    """What an engine says that holds NAMED."""
    with ThreadPoolExecutor(1) as pool:
        sums = SourceChecksums(pool)
        for name, tensor in NAMED:
            sums.add(name, tensor).result()
        return sums.total("float32", ())


def test_a_member_that_does_not_connect_is_blamed_and_the_others_are_not() -> None:
    class Joining(EngineLink):
        def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
            found = super().answers(epoch, number)
            return found | {"e/2": ViewAnswer(member="e/2", number=number, phase="prepared", detail="joining")}

    view = WeightView(
        run="t", epoch=1, step=1, number=1, phase="prepare", members=("e/1", "e/2"), buckets=(layout(NAMED),),
        rank_offsets=(1, 2), group="g", address="127.0.0.1", port=1, world_size=3,
    )  # fmt: skip
    link = cast(Any, Joining({member: {} for member in view.members}))
    made = Transfer(link, cast(GroupSender, Sent()), view, None, dict.fromkeys(view.members, ""))
    flat = torch.cat([tensor.view(torch.uint8) for _, tensor in NAMED])
    with pytest.raises(TransferFailed, match="prepare timed out, waiting for e/2") as caught:
        made.run(iter([PackedBucket(layout(NAMED), flat)]), prepare_s=0.05, transfer_s=30, stall_s=30)
    assert caught.value.missing == ("e/2",)


def test_the_next_bucket_is_sent_as_soon_as_the_last_one_is_and_not_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two looks at the members pass 30 seconds here: with those, three buckets would take a minute."""

    class Sending(Sent):
        def send(self, tensors: Any) -> Future[None]:
            done: Future[None] = Future()
            threading.Timer(0.1 if tensors else 0.0, done.set_result, [None]).start()
            return done

    bucket = layout(NAMED)
    view = WeightView(
        run="t", epoch=1, step=1, number=1, phase="prepare", members=("e/1",), buckets=(bucket,) * 3,
        rank_offsets=(1,), group="g", address="127.0.0.1", port=1, world_size=2,
    )  # fmt: skip
    sending, packed = Sending(), PackedBucket(bucket, torch.cat([tensor.view(torch.uint8) for _, tensor in NAMED]))
    sending.joined.result(30)
    made = Transfer(cast(Any, EngineLink({"e/1": {}})), cast(GroupSender, sending), view, None, {"e/1": ""})
    monkeypatch.setattr("learner.weights.transfer.POLL_S", 30.0)
    made.run(iter([packed] * 3), prepare_s=60, transfer_s=60, stall_s=60)
    assert made.seconds["transfer"] < 15


def test_the_limits_of_a_transfer_follow_the_network_and_the_engines() -> None:
    limits = TransferLimits(DistributedPublishSettings())
    assert (limits.join_s, limits.stall_s, limits.transfer_s(2), limits.transfer_s(9)) == (15.0, 20.0, 120.0, 200.0)
    for _ in range(2):  # a bucket needs a minute
        limits.failed(TransferFailed("transfer timed out", late=True))
    limits.failed(TransferFailed("e/1 is gone", ["e/1"]))
    assert (limits.join_s, limits.stall_s, limits.transfer_s(9)) == (60.0, 80.0, 800.0)
    done = SimpleNamespace(slowest_s=60.0, seconds={"prepare": 30.0})
    for _ in range(3):
        limits.note(cast(Any, done))
    assert (limits.join_s, limits.stall_s, limits.transfer_s(9)) == (150.0, 300.0, 3000.0)
    for _ in range(50):
        limits.note(cast(Any, SimpleNamespace(slowest_s=0.1, seconds={"prepare": 0.1})))
    assert (limits.join_s, limits.stall_s) == (15.0, 20.0), "a network that is fast again"


def test_members_that_hold_what_the_policy_has_are_committed() -> None:
    good = {"kind": "cpu", "checksum": "c", "tensors_sha256": right()}
    transfer({"e/1": good})
    transfer({"e/1": good, "e/2": good, "e/3": {"kind": "sglang", "checksum": "another layout"}})


def test_one_engine_alone_that_holds_something_else_is_found_out() -> None:
    """With one engine there is no other to compare it with: what the learner sent decides."""
    with pytest.raises(TransferFailed, match="the weights of e/1 differ from the policy"):
        transfer({"e/1": {"kind": "cpu", "checksum": "c", "tensors_sha256": "0" * 64}})


def test_engines_of_one_kind_that_differ_are_found_out() -> None:
    with pytest.raises(TransferFailed, match="checksums of the sglang engines differ"):
        transfer({"e/1": {"kind": "sglang", "checksum": "c"}, "e/2": {"kind": "sglang", "checksum": "d"}})


def test_only_members_that_know_the_token_of_the_run_are_sent_anything() -> None:
    access = Access({"node": "n" * 43})
    good = {"kind": "cpu", "checksum": "c", "tensors_sha256": right(), "token": member_token(access, "e/1", "g")}
    transfer({"e/1": good}, access)
    transfer({"e/1": {**good, "token": ""}})  # a run without tokens
    others = ["", member_token(access, "e/2", "g"), member_token(access, "e/1", "h")]
    for token in (*others, member_token(Access({"node": "m" * 43}), "e/1", "g")):
        with pytest.raises(TransferFailed, match="e/1 is not admitted") as caught:
            transfer({"e/1": {**good, "token": token}}, access)
        assert caught.value.missing == ("e/1",)


def test_engines_that_cut_the_weights_differently_are_not_compared_with_each_other() -> None:
    one, two = ({"kind": f"sglang/tp{n}/pp1/dp1/ep1/bfloat16/none", "checksum": str(n)} for n in (1, 2))
    transfer({"e/1": one, "e/2": two, "e/3": two})
    with pytest.raises(TransferFailed, match="checksums of the sglang/tp2"):
        transfer({"e/1": one, "e/2": two, "e/3": {**two, "checksum": "another"}})


@pytest.mark.parametrize(("room", "before"), [(0, 1), (2, 2), (3, 3)])
def test_no_more_is_gathered_before_the_pause_than_there_is_room_for(room: int, before: int) -> None:
    bucket = layout(NAMED)
    packed = PackedBucket(bucket, torch.cat([tensor.view(torch.uint8) for _, tensor in NAMED]))
    view = WeightView(
        run="t", epoch=1, step=1, number=1, phase="prepare", members=("e/1",), buckets=(bucket,) * 4,
        rank_offsets=(1,), group="g", address="127.0.0.1", port=1, world_size=2,
    )  # fmt: skip
    gathered: list[int] = []
    at_pause: list[int] = []

    class Pausing(EngineLink):
        def view(self, view: WeightView, ttl_s: float, plan: bytes = b"") -> None:
            super().view(view, ttl_s, plan)
            if view.phase == "transfer":
                at_pause.append(len(gathered))

    def buckets() -> Iterator[PackedBucket]:
        for number in range(4):
            gathered.append(number)
            yield packed

    made = Transfer(cast(Any, Pausing({"e/1": {}})), cast(GroupSender, Sent()), view, None, {"e/1": ""})
    made.run(buckets(), prepare_s=30, transfer_s=30, stall_s=30, room=room * packed.flat.numel())
    assert (at_pause, len(gathered)) == ([before], 4)
