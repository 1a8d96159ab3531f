"""Weights that cannot be the policy's stay here, whichever way they would have gone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import AdapterPublishSettings, DiskPublishSettings, LearnerSettings
from learner.weights import build_publisher
from learner.weights import checks as module
from learner.weights.base import BadWeights, in_use
from learner.weights.buckets import layout, pack, plan
from learner.weights.checks import WeightChecker, norm_of
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.messages import EngineInfo, NodeState
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support import tiny_learner

Named = list[tuple[str, torch.Tensor]]


def weights(first: float = 1.0, second: float = 1.0) -> Named:
    return [
        ("a", torch.full((4, 4), first)),
        ("b", torch.full((5,), second, dtype=torch.bfloat16)),
        ("n", torch.ones(2).int()),
    ]


class Silent(list[Any]):
    """A link over which nothing is said."""

    def target(self, update: Any, state: str) -> None:
        self.append(update.version)


@pytest.fixture
def alone(tmp_path: Path) -> RunSettings:
    return RunSettings(id="t1", dir=tmp_path / "run", model=tmp_path)


def test_a_norm_is_that_of_all_elements_in_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.arange(30).reshape(5, 6).to(dtype).t()
        assert float(norm_of(tensor)) == pytest.approx(math.sqrt(sum(n * n for n in range(30))))
    for bad in (math.nan, math.inf, -math.inf):
        assert not math.isfinite(float(norm_of(torch.tensor([1.0] * 20 + [bad]))))


@pytest.mark.fault(40)
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (weights(second=math.nan), "tensor b contains a non-finite value"),
        (weights(second=0.0), "tensor b is all zeros, but its norm was 2.236"),
        (weights(first=9.0), r"at least 7\.86 times .*max_norm_jump is 4\); tensor a changed most: from 4 to 36"),
        (weights(0.1, 0.1), r"is 0\.1 times .*tensor a changed most: from 4 to 0\.4"),
    ],
    ids=["not finite", "zeros", "grown", "shrunk"],
)
def test_weights_that_no_step_can_have_made_are_not_published(alone: RunSettings, bad: Named, why: str) -> None:
    publisher = build_publisher(DiskPublishSettings(fsync=False), alone, [], Silent())
    publisher.publish(PolicyVersion(1, 1), weights())
    with pytest.raises(BadWeights, match=why):
        publisher.publish(PolicyVersion(1, 2), bad)
    assert [p.name for p in alone.weights_dir.iterdir()] == ["v1.1"], "the last good version is there and nothing else"
    publisher.publish(PolicyVersion(1, 2), weights(3.0, 3.0))  # as far as a step may go
    publisher.publish(PolicyVersion(1, 3), weights(9.0, 9.0))  # it is the last one that is compared with


def test_zeros_that_were_zeros_and_any_first_version_pass(alone: RunSettings) -> None:
    publisher = build_publisher(DiskPublishSettings(fsync=False), alone, [], Silent())
    publisher.publish(PolicyVersion(1, 0), weights(0.0, 0.0))  # a fresh adapter's B
    publisher.publish(PolicyVersion(1, 1), weights(0.0, 5.0))
    careless = build_publisher(DiskPublishSettings(fsync=False, max_norm_jump=0), alone, [], Silent())
    for number, size in enumerate((1.0, 1e6, 1e-6)):
        careless.publish(PolicyVersion(2, number), weights(size, size))


@pytest.mark.fault(40)
def test_an_adapter_is_inspected_too(alone: RunSettings) -> None:
    publisher = build_publisher(AdapterPublishSettings(fsync=False), alone, [], Silent())

    def lora(size: float) -> Named:
        at = "model.layers.0.self_attn.q_proj"
        return [(f"{at}.lora_A.weight", torch.full((4, 16), size)), (f"{at}.lora_B.weight", torch.zeros(16, 4))]

    publisher.publish(PolicyVersion(1, 0), lora(1.0))
    with pytest.raises(BadWeights, match=r"tensor base_model.model.*lora_A.weight changed most"):
        publisher.publish(PolicyVersion(1, 1), lora(50.0))


@pytest.mark.fault(40)
def test_buckets_end_at_the_tensor_with_which_they_have_grown_too_much() -> None:
    sanity = WeightChecker(4.0)
    named = [(f"t{i}", torch.ones(64)) for i in range(8)]
    seen = sanity.inspection()
    assert len(list(pack(plan(layout(named), 256), iter(named), seen))) == 8
    sanity.published(PolicyVersion(1, 0), seen)
    grown = [(name, tensor * (1e6 if name == "t3" else 1)) for name, tensor in named]
    sent = []
    with pytest.raises(BadWeights, match="tensor t3 changed most"):
        for packed in pack(plan(layout(named), 256), iter(grown), sanity.inspection()):
            sent.append(packed)
    assert len(sent) == 3, "and nothing of it was packed"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"t3": float("nan")}, "tensor t3 contains a non-finite value"),
        ({"t3": 0.0}, "tensor t3 is all zeros"),
        ({"t3": 1e6}, "tensor t3 changed most"),
        ({f"t{i}": 1e-3 for i in range(8)}, "times that of the previous version"),
        ({}, ""),
    ],
)
def test_a_check_that_reads_the_values_once_finds_the_same(
    wrong: dict[str, float], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanity = WeightChecker(4.0)
    named = [(f"t{i}", torch.ones(64)) for i in range(8)]
    reads: list[int] = []
    read = torch.Tensor.tolist
    seen = sanity.inspection(deferred=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or read(self))
        patch.setattr(torch.Tensor, "__float__", None)  # nothing is read before the end
        assert len(list(pack(plan(layout(named), 256), iter(named), seen))) == 8
    assert reads == [8 + 8], "every norm and every comparison, at once"
    sanity.published(PolicyVersion(1, 0), seen)
    changed = [(name, tensor * wrong.get(name, 1.0)) for name, tensor in named]
    with pytest.raises(BadWeights, match=says) if wrong else contextlib.nullcontext():
        list(pack(plan(layout(named), 256), iter(changed), sanity.inspection(deferred=True)))


@pytest.mark.fault(40)
def test_the_learner_stops_with_a_reason_and_the_engines_keep_the_last_good_version(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    db: redis.Redis, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from protocol.codec import decode_as
    from protocol.messages import WeightUpdate

    real = tiny_learner.TinyEngine.iter_weights

    def poisoned(self: Any, device: str = "cpu") -> Any:
        for name, tensor in real(self, device):
            yield name, tensor * 1e6 if self.updates == 5 and name == "tied" else tensor

    monkeypatch.setattr(tiny_learner.TinyEngine, "iter_weights", poisoned)
    with tiny_learner.Player(address, run.id), pytest.raises(UserError) as caught:
        serve(run, settings)
    assert "the weights of version 1.5 were rejected" in caught.value.what and "tensor tied" in caught.value.what
    assert "checkpoint of step 3" in caught.value.todo and "learner.publish.max_norm_jump" in caught.value.todo
    target = decode_as(WeightUpdate, db.hget(Keys(run.id).target, "b"))
    assert target.version == (1, 4) and Path(target.path, "model.safetensors").is_file()
    assert not (run.weights_dir / "v1.5").exists()
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found and found.facts["step"] == 3, "no checkpoint holds them either"
    kinds = [fields[b"kind"] for _, fields in db.xrange(Keys(run.id).events)]
    assert b"weights-refused" in kinds, "and it is in the run's history"
    monkeypatch.undo()
    with tiny_learner.Player(address, run.id):
        assert serve(run, settings) == 0, "the same command goes on"


@pytest.mark.fault(42)
def test_what_an_engine_holds_or_is_about_to_read_is_in_use() -> None:
    def engine(detail: str, state: NodeState = NodeState.READY) -> EngineInfo:
        return EngineInfo(id="e", url="u", state=state, epoch=1, step=4, detail=detail)

    held = PolicyVersion(1, 4)
    assert in_use([engine("")]) == {held}
    assert in_use([engine("1.7", NodeState.LOADING)]) == {held, (1, 7)}
    for detail in ("verifying 1.7", "reading 1.7", "launching with 1.7"):
        assert in_use([engine(detail)]) == {held, (1, 7)}
    assert in_use([engine("1.7 is loaded in part: http 500")]) == {held}
