"""The path that a GPU takes, but for CUDA itself: a lazy group, buckets that are gathered before the engines pause,
checks that are read once, copies that arrive later. Real engines hold and report what they received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.config.learner import DistributedPublishSettings
from learner.delivery.store import RunStore
from learner.weights import broadcast, buckets, build_publisher, staging
from learner.weights.base import BadWeights, WeightPublisher
from protocol.messages import WeightView
from protocol.versions import PolicyVersion
from protocol.weights import WeightBucket
from tests.support.fleet import Fleet, Weights, step, two_engines
from tests.support.lazy_group import DeviceStaging, LazyGroup, lazy_groups

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, redis_socket: str) -> Iterator[Fleet]:
    with two_engines(tmp_path_factory.mktemp("staged"), redis_socket) as made:
        yield made


@pytest.fixture
def fleet(engines: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    engines.start_missing("a", "b")
    monkeypatch.setitem(staging.STAGING, "gloo", "tests.support.lazy_group:DeviceStaging")
    monkeypatch.setattr(DeviceStaging, "free", 1 << 40)
    with lazy_groups(monkeypatch):
        yield engines
        engines.forget()


class PhaseLink:
    """The store, with a call before each phase of a view is written."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self.phases: list[str] = []
        self.then: Callable[[str], object] = lambda phase: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def view(self, view: WeightView, ttl_s: float, plan: bytes = b"") -> None:
        self.phases.append(view.phase)
        self.then(view.phase)
        self._store.view(view, ttl_s, plan)


def learner(fleet: Fleet, **settings: Any) -> tuple[PhaseLink, WeightPublisher, int]:
    """A learner whose first version the engines hold."""
    store, publisher, epoch = fleet.learner()
    publisher.close()
    given: dict[str, Any] = {
        "fsync": False,
        "bucket_mb": 1,
        "max_norm_jump": 0.0,
        "transfer_s": 20.0,
        "patience_s": 0.0,
    }
    link = PhaseLink(store)
    files = sorted(fleet.run.model.glob("*.json"))
    publisher = build_publisher(DistributedPublishSettings(**given | settings), fleet.run, files, link)
    fleet.publishers.append(publisher)
    first = step(publisher, PolicyVersion(epoch, 0), fleet.weights)
    fleet.ready("a", "b", at=first.version)
    return link, publisher, epoch


@pytest.mark.parametrize("room", ["all", "two buckets", "none"])
def test_what_there_is_room_for_is_gathered_before_the_engines_pause(
    fleet: Fleet, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "SMALLEST_BUCKET", 1)
    size = sum(4 * tensor.numel() for tensor in fleet.weights.values()) // broadcast.PIECES
    planned = buckets.plan(buckets.layout(fleet.weights.items()), size)
    assert len(planned) > 3
    largest = max(map(buckets.num_bytes, planned))
    monkeypatch.setattr(DeviceStaging, "free", {"all": 1 << 40, "two buckets": 2 * largest, "none": 0}[room])
    before = len(planned) if room == "all" else 2 if room == "two buckets" else 1
    link, publisher, epoch = learner(fleet)
    gathered: list[str] = []
    at_pause: list[int] = []
    link.then = lambda phase: at_pause.append(len(gathered)) if phase == "transfer" else None

    def gather(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            gathered.append(name)
            yield name, tensor

    for number in (1, 2):
        gathered.clear()
        version, weights = PolicyVersion(epoch, number), fleet.shifted(number / 8)
        update = publisher.publish(version, gather(weights))
        publisher.announce(update, "ready")
        assert update.transport == "distributed"
        fleet.ready("a", "b", at=version)
        assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(weights)
    assert at_pause == [sum(len(bucket.names) for bucket in planned[:before])] * 2
    (group,) = LazyGroup.opened
    assert len(group.marks) == 1 + 2 * len(planned), "the group was proven, and kept"
    # the files at the end are written from the copy in main memory
    publisher.announce(update, "done")
    assert fleet.expected(load_file(f"{fleet.target().path}/model.safetensors")) == fleet.expected(weights)


@pytest.mark.parametrize("first", [True, False], ids=["new group", "known group"])
def test_an_engine_that_dies_at_the_pause_costs_one_version_by_files(fleet: Fleet, first: bool) -> None:
    link, publisher, epoch = learner(fleet)
    number = 1
    if not first:
        fleet.ready("a", "b", at=step(publisher, PolicyVersion(epoch, 1), fleet.shifted(0.125)).version)
        number = 2
    link.then = lambda phase: fleet.nodes["b"].kill() if phase == "transfer" else None
    update = step(publisher, PolicyVersion(epoch, number), fleet.shifted(0.5))
    assert (update.transport, publisher.facts()["publish_fallbacks"]) == ("disk", 1)
    assert LazyGroup.opened[-1].aborts == 1
    fleet.nodes["b"].wait()
    fleet.ready("a", at=update.version)
    assert fleet.checksums("a") == fleet.expected(fleet.shifted(0.5)), "the files are of the copies"


def test_weights_that_are_no_policys_never_pause_an_engine(fleet: Fleet) -> None:
    link, publisher, epoch = learner(fleet)
    link.phases.clear()
    bad = fleet.shifted(1e-3)
    next(iter(bad.values())).view(-1)[3] = float("nan")
    with pytest.raises(BadWeights, match="non-finite"):
        publisher.publish(PolicyVersion(epoch, 1), bad.items())
    assert link.phases == ["prepare", "abort"]
    fleet.ready("a", "b", at=PolicyVersion(epoch, 0))
    assert fleet.checksums("a") == fleet.expected(fleet.weights)


def test_a_bucket_that_is_not_what_was_gathered_is_never_sent(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    link, publisher, epoch = learner(fleet)
    link.phases.clear()
    real = buckets._starts

    def swapped(bucket: WeightBucket) -> list[int]:
        starts = real(bucket)
        names = [f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qo"]
        if set(names) <= set(bucket.names):
            q, o = map(bucket.names.index, names)
            starts[q], starts[o] = starts[o], starts[q]
        return starts

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "_starts", swapped)
        update = publisher.publish(PolicyVersion(epoch, 1), fleet.shifted(0.5).items())
    publisher.announce(update, "ready")
    assert update.transport == "disk" and "transfer" not in link.phases
    fleet.ready("a", "b", at=update.version)
    assert fleet.checksums("a") == fleet.expected(fleet.shifted(0.5)), "it was gathered again"
