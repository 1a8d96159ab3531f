"""Which engines a view has: versions that cannot meet are named once, and only what every member holds is a proof."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch

from learner.weights.membership import Membership, Proof, mismatch
from protocol.messages import EngineInfo, NodeState, WeightUpdate
from protocol.versions import PolicyVersion

OURS = {"torch": "2.13.0+cpu", "nccl": "2.29.7"}
LAST = WeightUpdate(run="t", epoch=1, step=4, digest="d", path="/v1.4")


def engine(name: str, versions: dict[str, str] | None = None, **more: Any) -> EngineInfo:
    given = {"state": NodeState.READY, "epoch": 1, "step": 4, "incarnation": "a", "transports": ("disk", "distributed")}
    return EngineInfo(id=name, url="u", versions=versions or {}, **{**given, **more})


class Link:
    def __init__(self, *engines: EngineInfo) -> None:
        self.found = list(engines)

    def engines(self) -> list[EngineInfo]:
        return self.found

    def evaluating(self) -> bool:
        return False


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
