"""What a learner announces, sends and falls back to, with engines that are a script.

The group behaves as NCCL's does, and has one rank. `test_publish_distributed.py` has real engines.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from learner.config.learner import DistributedPublishSettings
from learner.weights import broadcast, buckets, staging
from learner.weights.base import WeightPublisher
from learner.weights.broadcast import DistributedPublisher
from protocol.codec import decode_as
from protocol.messages import NEEDS_BROADCAST, EngineInfo, NodeState, ViewAnswer, WeightUpdate, WeightView
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from protocol.weights import DIGESTS, WeightBucket, WeightPlan
from tests.support.lazy_group import DeviceStaging, LazyGroup, lazy_groups

V = [PolicyVersion(1, step) for step in range(6)]
NAMES = ("a.weight", "b.weight", "c.weight", "norm.weight")


def weights(scale: float) -> dict[str, torch.Tensor]:
    """Four tensors of 64 bytes each."""
    return {name: scale * torch.arange(16.0) + place for place, name in enumerate(NAMES)}


class Link:
    """Engines that take part in every view. `change`: what their last answer says otherwise."""

    def __init__(self) -> None:
        self.found = [engine("e1", ranks=2), engine("e2")]
        self.views: list[WeightView] = []
        self.plans: list[bytes] = []
        self.targets: list[tuple[WeightUpdate, str]] = []
        self.change: dict[str, Any] = {}
        self.before: Callable[[WeightView], object] = lambda view: None

    def engines(self) -> list[EngineInfo]:
        return self.found

    def pin(self) -> None:
        return None

    def now(self) -> float:
        return time.time()

    def target(self, update: WeightUpdate, state: str) -> None:
        self.targets.append((update, state))
        known = {"epoch": update.epoch, "step": update.step}
        self.found = [e if e.needs_broadcast else e.model_copy(update=known) for e in self.found]

    def view(self, view: WeightView, ttl_s: float, plan: bytes = b"") -> None:
        self.before(view)
        self.views.append(view)
        self.plans.append(plan)

    def next_answers(self, epoch: int, number: int, after: str, wait_s: float) -> tuple[dict[str, ViewAnswer], str]:
        return self.answers(epoch, number), after

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        last = self.views[-1]
        given: dict[str, Any] = {"number": number, "phase": "prepared"}
        if last.phase == "transfer":
            given = {"number": number, "phase": "loaded", "kind": "cpu", "checksum": "c"} | self.change
        return {member: ViewAnswer(member=member, **given) for member in last.members}

    @property
    def phases(self) -> list[str]:
        return [view.phase for view in self.views]


def engine(name: str, **more: Any) -> EngineInfo:
    given = {"state": NodeState.READY, "incarnation": "i", "transports": ("disk", "distributed"), "dtype": "float32"}
    return EngineInfo(id=name, url="u", **{**given, "checksums": tuple(DIGESTS), **more})


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(broadcast, "SMALLEST_BUCKET", 128)
    monkeypatch.setattr(LazyGroup, "alone", True)
    with lazy_groups(monkeypatch):
        yield Link()


Make = Callable[..., DistributedPublisher]


@pytest.fixture
def make(link: Link, tmp_path: Path) -> Iterator[Make]:
    made: list[WeightPublisher] = []
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.write_text('{"model_type": "tiny"}')
    run = RunSettings(id="t1", dir=tmp_path / "run", model=tmp_path / "model")

    def publisher(**more: Any) -> DistributedPublisher:
        settings = DistributedPublishSettings(**{"fsync": False, "max_norm_jump": 0.0, "patience_s": 0.0, **more})
        made.append(DistributedPublisher(settings, run, [config], cast(Any, link)))
        return cast(DistributedPublisher, made[-1])

    yield publisher
    for one in made:
        one.close()


def step(publisher: DistributedPublisher, version: PolicyVersion, scale: float, state: str = "ready") -> WeightUpdate:
    update = publisher.publish(version, weights(scale).items())
    publisher.announce(update, state)
    return update


def assert_holds(path: str, scale: float) -> None:
    found = load_file(f"{path}/model.safetensors")
    assert found.keys() == set(NAMES) and all(found[name].equal(tensor) for name, tensor in weights(scale).items())


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "cuda")])
def test_tensors_are_wanted_where_the_group_sends_from(
    make: Make, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(staging.STAGING, "nccl", "tests.support.lazy_group:DeviceStaging")
    assert make(backend=backend).device == device


BOTH = tuple(DIGESTS)


@pytest.mark.parametrize(
    ("settings", "token", "known", "checksum", "named"),
    [
        ({}, False, BOTH, "xxh3_128", True),
        ({"checksum": "sha256"}, False, BOTH, "sha256", True),
        ({"address": "0.0.0.0"}, False, BOTH, "sha256", True),
        ({"address": "0.0.0.0"}, True, BOTH, "xxh3_128", True),
        ({}, False, ("sha256",), "sha256", True),
        ({}, False, (), "sha256", False),
    ],
    ids=["default", "set", "not authenticated", "authenticated", "an older engine", "an older node"],
)
def test_a_view_names_a_checksum_that_is_safe_there_and_that_every_member_knows(
    make: Make, link: Link, settings: dict[str, Any], token: bool, known: tuple[str, ...], checksum: str, named: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if token:
        monkeypatch.setenv("FORAY_NODE_TOKEN", "".join(map(chr, range(40, 80))))
        monkeypatch.setattr("learner.weights.transfer.member_token", lambda *_: "")  # scripted members do not know it
    link.found = [engine("e1"), engine("e2", checksums=known)]
    publisher = make(**settings)
    step(publisher, V[0], 1.0)
    assert step(publisher, V[1], 2.0).transport == "distributed"
    view = link.views[0]
    assert (view.checksum, bool(view.plan), bool(link.plans[0]), bool(view.buckets)) == (
        checksum, named, named, not named,
    )  # fmt: skip


@pytest.mark.parametrize("deferred", [False, True])
def test_the_first_version_goes_by_files_and_the_next_by_one_group(
    make: Make, link: Link, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if deferred:
        monkeypatch.setitem(staging.STAGING, "gloo", "tests.support.lazy_group:DeviceStaging")
        monkeypatch.setattr(DeviceStaging, "free", 1 << 30)
    publisher = make()
    first = step(publisher, V[0], 1.0)
    assert (first.transport, first.broadcast, link.views) == ("disk", True, []) and first.path
    for number in (1, 2):
        update = step(publisher, V[number], 1.0 + number)
        assert (update.version, update.transport, update.path) == (V[number], "distributed", "")
        assert (update.num_bytes, update.broadcast, update.digest) == (256, True, "cpu:c")
        last = link.views[-1]
        assert (last.phase, last.number, last.members) == ("commit", number, ("e1/i", "e2/i"))
        assert (last.rank_offsets, last.world_size) == ((1, 3), 4)
    facts = publisher.facts()
    assert {name: value for name, value in facts.items() if not name.endswith("_s")} == {
        "publish_distributed": 2, "publish_disk": 1, "publish_fallbacks": 0, "publish_again": 0,
        "publish_snapshots": 0, "publish_bytes": 256, "publish_members": 2,
    }  # fmt: skip
    assert all(facts[f"publish_{phase}_s"] >= 0 for phase in ("gather", "prepare", "transfer", "verify", "commit"))
    assert link.phases == ["prepare", "transfer", "commit"] * 2 and len(LazyGroup.opened) == 1
    plan, view = link.plans[0], link.views[0]
    assert [len(b.names) for b in decode_as(WeightPlan, plan).buckets] == [2, 2] and not view.buckets
    assert (view.plan, view.checksum) == (hashlib.sha256(plan).hexdigest(), "xxh3_128")
    assert [bool(plan) for plan in link.plans] == [True, False, False] * 2, "it is read once, the view several times"
    publisher.announce(update, "done")
    written, state = link.targets[-1]
    assert (written.transport, written.broadcast, state) == ("distributed", True, "done")
    assert_holds(written.path, 3.0)
    publisher.announce(written, "done")
    assert publisher.facts()["publish_disk"] == 1 and link.phases[-1] == "commit" and len(link.phases) == 6


def test_a_new_member_makes_a_new_group_and_the_next_epoch_begins_with_files(make: Make, link: Link) -> None:
    publisher = make()
    step(publisher, V[0], 1.0)
    step(publisher, V[1], 2.0)
    link.found.append(engine("e3", epoch=1, step=1))
    step(publisher, V[2], 3.0)
    step(publisher, V[3], 4.0)
    groups = [view.group for view in link.views if view.phase == "prepare"]
    assert len(LazyGroup.opened) == 2 and groups[0] != groups[1] == groups[2]
    assert all(group.startswith("t1-1-") for group in groups) and link.views[-1].number == 3
    assert step(publisher, PolicyVersion(2, 3), 5.0).transport == "disk"
    assert step(publisher, PolicyVersion(2, 4), 6.0).transport == "distributed"
    assert link.views[-1].number == 1, "views are numbered in each epoch"


@pytest.mark.parametrize("change", [{"phase": "failed", "detail": "out of memory"}, {"tensors_sha256": "0" * 64}])
@pytest.mark.parametrize("late", [False, True])
def test_a_transfer_that_fails_costs_one_version_by_files(
    make: Make, link: Link, change: dict[str, Any], late: bool
) -> None:
    publisher = make()
    step(publisher, V[0], 1.0)
    if late:
        step(publisher, V[1], 2.0)
    link.views.clear()
    link.change = change
    update = step(publisher, V[2], 3.0)
    assert (update.transport, update.broadcast, link.phases) == ("disk", True, ["prepare", "transfer", "abort"])
    assert_holds(update.path, 3.0)
    link.change = {}
    assert step(publisher, V[3], 4.0).transport == "distributed", "one failure is tried again at once"
    facts = publisher.facts()
    assert (facts["publish_fallbacks"], facts["publish_disk"], facts["publish_distributed"]) == (1, 2, 1 + late)
    assert len(LazyGroup.opened) == 2, "in a new group"


def test_a_redis_that_is_away_at_the_abort_does_not_stop_the_fallback(make: Make, link: Link) -> None:
    publisher = make()
    step(publisher, V[0], 1.0)

    def away(view: WeightView) -> None:
        if view.phase in ("transfer", "abort"):
            raise RedisUnavailable("gone")

    link.before = away
    update = step(publisher, V[1], 2.0)
    assert update.transport == "disk"
    assert_holds(update.path, 2.0)


@pytest.mark.parametrize(
    ("dtype", "phases"), [("", ["prepare", "abort"]), ("float32", ["prepare", "transfer", "commit"])]
)
@pytest.mark.parametrize("iterator", [False, True])
def test_each_bucket_is_read_back_if_an_engine_reports_no_tensors(
    make: Make, link: Link, dtype: str, phases: list[str], iterator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors change places in their bucket. An engine that reports its tensors would find that out by itself."""
    publisher = make()
    step(publisher, V[0], 1.0)
    link.found = [link.found[0], engine("e2", dtype=dtype, epoch=1)]
    real = buckets._starts

    def swapped(bucket: WeightBucket) -> list[int]:
        return real(bucket)[::-1]

    monkeypatch.setattr(buckets, "_starts", swapped)
    given: Any = weights(2.0).items()
    if dtype or not iterator:
        update = publisher.publish(V[1], iter(given) if iterator else given)
        publisher.announce(update, "ready")
        assert (update.transport, link.phases) == ("distributed" if dtype else "disk", phases)
        if not dtype:
            assert_holds(update.path, 2.0)
    else:
        with pytest.raises(broadcast.PackingError):
            publisher.publish(V[1], iter(given))
        assert link.phases == phases


def test_the_announced_version_is_sent_again_to_those_that_need_it(make: Make, link: Link) -> None:
    publisher = make()

    def unread() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("nobody waits: the weights must not be gathered")
        yield

    publisher.send_again(unread())
    step(publisher, V[0], 1.0)
    publisher.send_again(unread())
    detail = f"{NEEDS_BROADCAST} /x is not on this host"
    link.found.append(engine("e3", state=NodeState.SYNCING, detail=detail))
    given = iter(weights(1.0).items())
    link.change = {"phase": "failed", "detail": "out of memory"}
    publisher.send_again(given)
    assert next(given, None) is None, "gathering is collective: all ranks take part to the end"
    assert (link.phases, publisher.facts()["publish_again"]) == (["prepare", "transfer", "abort"], 0)
    publisher.send_again(unread())  # not at once
    link.change = {}
    publisher._membership._retry_at = 0.0
    publisher.send_again(weights(1.0).items())
    last = link.views[-1]
    assert (last.phase, last.members, last.version, last.rank_offsets) == ("commit", ("e3/i",), V[0], (1,))
    facts = publisher.facts()
    assert (facts["publish_again"], facts["publish_distributed"], facts["publish_fallbacks"]) == (1, 0, 0)
    link.found.pop()
    assert step(publisher, V[1], 2.0).transport == "distributed" and len(link.views[-1].members) == 2


def test_no_engine_that_is_ready_means_files(make: Make, link: Link) -> None:
    publisher = make()
    step(publisher, V[0], 1.0)
    link.found = []
    update = step(publisher, V[1], 2.0)
    assert update.transport == "disk" and not link.views
    assert_holds(update.path, 2.0)
    publisher.announce(update, "done")
    assert link.targets[-1] == (update, "done"), "it has files"
