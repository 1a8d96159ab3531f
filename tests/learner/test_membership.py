"""Which engines a view has: versions that cannot meet are named once, and only what every member holds is a proof."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch

from learner.weights import membership
from learner.weights.membership import Membership, Proof, mismatch
from protocol.messages import NEEDS_BROADCAST, EngineInfo, NodeState, WeightUpdate
from protocol.versions import PolicyVersion, VersionPin

OURS = {"torch": "2.13.0+cpu", "nccl": "2.29.7"}
LAST = WeightUpdate(run="t", epoch=1, step=4, digest="d", path="/v1.4")


def engine(name: str, versions: dict[str, str] | None = None, **more: Any) -> EngineInfo:
    given = {"state": NodeState.READY, "epoch": 1, "step": 4, "incarnation": "a", "transports": ("disk", "distributed")}
    return EngineInfo(id=name, url="u", versions=versions or {}, **{**given, **more})


class Link:
    def __init__(self, *engines: EngineInfo) -> None:
        self.found = list(engines)
        self.pinned: VersionPin | None = None

    def engines(self) -> list[EngineInfo]:
        return self.found

    def pin(self) -> VersionPin | None:
        return self.pinned


@pytest.mark.parametrize(
    ("theirs", "backend", "why"),
    [
        ({}, "nccl", ""),
        ({"torch": "2.13.0"}, "gloo", ""),
        ({"torch": "2.13.0+cu130", "nccl": "2.29.7"}, "nccl", ""),
        ({"torch": "2.14.1"}, "gloo", "it has torch 2.14.1, the learner 2.13.0"),
        ({"torch": "2.13.0", "nccl": "2.30.7"}, "nccl", "it has nccl 2.30.7, the learner 2.29.7"),
        ({"torch": "2.13.0", "nccl": "2.30.7"}, "gloo", ""),
    ],
)
def test_versions_that_cannot_form_a_group_are_named(theirs: dict[str, str], backend: str, why: str) -> None:
    assert mismatch(OURS, theirs, backend) == why


def test_an_engine_of_other_versions_is_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    link = Link(engine("a", dict(OURS)), engine("b", {"torch": "2.14.1"}))
    members = Membership(cast(Any, link), "gloo", OURS)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found, _ = members.of_next(LAST)
            assert [e.id for e in found] == ["a"]
        link.found[1] = engine("b", {"torch": "2.14.1"}, incarnation="b")
        members.of_next(LAST)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("b gets every version as files: it has torch 2.14.1" in line for line in said)
    link.found[1] = engine("b", dict(OURS), incarnation="c")
    assert [e.id for e in members.of_next(LAST)[0]] == ["a", "b"], "once it is upgraded it is a member"


def test_an_engine_that_needs_a_broadcast_is_a_member_from_any_state_and_at_any_version() -> None:
    waits = {"detail": f"{NEEDS_BROADCAST} /v1.4 is not on this host", "epoch": 0, "step": 0}
    states = (NodeState.READY, NodeState.SYNCING, NodeState.QUARANTINED)
    found = [engine(str(state), state=state, **waits) for state in NodeState]
    behind = engine("reads files", step=3)
    link = Link(engine("z"), behind, *found, engine("adapter", state=NodeState.READY, **waits | {"transports": ()}))
    members = Membership(cast(Any, link), "gloo", OURS)
    assert [e.id for e in members.of_next(LAST)[0]] == sorted(["z", *map(str, states)])
    assert [e.id for e in members.of_again(LAST)] == sorted(map(str, states))


def test_a_version_is_sent_again_with_patience_and_after_failures_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: clock[0])
    link = Link(engine("b", state=NodeState.SYNCING, detail=f"{NEEDS_BROADCAST} why"))
    members = Membership(cast(Any, link), "gloo", OURS, patience_s=5.0)
    assert members.of_again(LAST) == [], "the next version may come first"
    clock[0] += 5.0
    assert [e.id for e in members.of_again(LAST)] == ["b"]
    waited = []
    for _ in range(9):
        members.failed([])
        before = clock[0]
        while not members.of_again(LAST):
            clock[0] += 1.0
        waited.append(clock[0] - before)
    assert waited == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0], "but never for ever"
    members.failed(["b/a"])
    clock[0] += 59.0
    assert members.of_again(LAST) == []
    clock[0] += 2.0
    assert members.of_again(LAST), "one that delayed the others is excluded for a minute"
    members.succeeded()
    assert members.of_next(LAST)[0], "and the next version is not skipped"
    skipped = []
    for _ in range(7):
        members.failed([])
        skipped.append(members._skip_versions)
    assert skipped == [0, 1, 3, 7, 15, 31, 32]
    for _ in range(1100):  # 2.0**1024 is no float
        members.failed([])
    assert members._retry_at == clock[0] + 60.0


def test_a_proof_is_a_small_tensor_that_every_member_holds() -> None:
    weights = [
        ("model.embed.weight", torch.ones(8, 4)),
        ("model.layers.0.input_layernorm.weight", torch.ones(8)),
        ("model.norm.weight", torch.full((4,), 2.0, dtype=torch.bfloat16)),
        ("model.layers.0.q.bias", torch.ones(1)),
    ]
    proof, good = Proof(), engine("a", proves=True)
    assert proof.of([good]) is None, "nothing is published yet"
    assert list(proof.noting(iter(weights))) == weights
    assert proof.of([good]) is None, "and not yet announced"
    proof.published(PolicyVersion(1, 4))
    found = proof.of([good])
    assert found is not None and found.bucket.names == ("model.norm.weight",)
    assert [tensor.tolist() for _, tensor in found.tensors()] == [[2.0] * 4]
    list(proof.noting([("model.norm.weight", torch.zeros(4))]))
    proof.published(PolicyVersion(1, 4))  # an announcement that is repeated while the next version is gathered
    assert proof.of([good]) is found
    assert proof.of([good, engine("b", proves=False)]) is None, "a quantised engine"
    assert proof.of([good, engine("b", proves=True, step=3)]) is None, "an engine that is behind"
    joins = engine("b", proves=True, step=0, epoch=0, state=NodeState.SYNCING)
    assert proof.of([good, joins]) is found, "one that serves no version loses none"


def test_an_evaluation_keeps_only_the_engines_that_serve_it() -> None:
    link = Link(engine("a"), engine("e", role="eval"), engine("f", role="eval", detail=f"{NEEDS_BROADCAST} why"))
    members = Membership(cast(Any, link), "gloo", OURS)

    def taking_part() -> tuple[list[str], list[str]]:
        return [e.id for e in members.of_next(LAST)[0]], [e.id for e in members.of_again(LAST)]

    assert taking_part() == (["a", "e", "f"], ["f"])
    link.pinned = VersionPin("r", eval_engines=True)
    assert taking_part() == (["a"], [])
    link.pinned = VersionPin("r", eval_engines=True, version=LAST.version)
    assert taking_part() == (["a"], ["f"]), "the version under evaluation reaches an engine that lacks it"
    link.pinned = VersionPin("r")
    assert members.of_next(LAST) == ([], "an evaluation is running")
