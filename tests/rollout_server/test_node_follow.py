"""What a node follows, over scripted announcements: how often it tries, and which epochs it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from protocol.messages import INITIAL, EngineInfo, NodeState, WeightUpdate
from protocol.runtime.files import model_digest
from protocol.versions import PolicyVersion
from rollout_server.engine.base import EngineError
from rollout_server.metrics import Stats
from rollout_server.node.config import NodeSettings
from rollout_server.node.registry import TargetView
from rollout_server.node.status import NO_VERSION, EngineStatus
from rollout_server.node.weights import follower
from rollout_server.node.weights.follower import WeightFollower
from tests.support.waiting import eventually


class Announcements:
    """Stands for Redis: always the same target."""

    def __init__(self, epoch: int) -> None:
        self.update = WeightUpdate(run="r", epoch=epoch, step=1, digest="d", path="/nowhere/v")
        self.reads = 0

    async def target_view(self) -> TargetView:
        self.reads += 1
        return TargetView(self.update, None, 0.0)

    async def woken(self, longest_s: float) -> None:
        await asyncio.sleep(longest_s)

    async def held_back(self, role: object, version: PolicyVersion) -> bool:
        return False


class Silent:
    """An engine that does not answer."""

    name = "e"

    async def health(self, *, timeout_s: float) -> None:
        raise EngineError("unreachable", "e", "scripted")


def following(announced: Announcements) -> tuple[WeightFollower, EngineStatus]:
    status = EngineStatus(EngineInfo(id="e", url="", state=NodeState.JOINING))
    settings = NodeSettings(id="e", poll_s=0.01)
    return WeightFollower(status, cast(Any, announced), settings, Stats("node", "e"), Path("/nowhere")), status


async def test_files_that_stay_absent_for_hours_are_looked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "LONGEST_RETRY_S"):
        monkeypatch.setattr(follower, name, 0.0)
    announced = Announcements(epoch=1)
    node, _ = following(announced)
    follow = asyncio.create_task(node.follow(cast(Any, Silent())))
    await eventually(lambda: announced.reads > 1100 or follow.done(), "2**1024, which is no float", 20)
    assert not follow.done(), follow.exception()
    follow.cancel()
    await asyncio.gather(follow, return_exceptions=True)


class Labelled:
    """An engine that a node has just launched, and that takes labels."""

    name = "e"

    def __init__(self) -> None:
        self.held, self.labels = NO_VERSION, list[str]()

    async def version(self) -> PolicyVersion:
        return self.held

    async def label(self, label: str) -> None:
        self.labels.append(label)
        self.held = PolicyVersion.parse(label) or NO_VERSION


async def test_a_version_that_was_labelled_is_followed_by_the_next_one_without_a_pause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RETRY_S", "LONGEST_RETRY_S"):
        monkeypatch.setattr(follower, name, 600.0)
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    announced = Announcements(epoch=1)
    digest = INITIAL + model_digest(tmp_path)
    announced.update = announced.update.model_copy(update={"digest": digest, "step": 0})
    status = EngineStatus(EngineInfo(id="e", url="", state=NodeState.READY))
    settings, engine = NodeSettings(id="e", poll_s=0.01), Labelled()
    node = WeightFollower(status, cast(Any, announced), settings, Stats("node", "e"), tmp_path)
    node.unlabelled = True
    follow = asyncio.create_task(node.follow(cast(Any, engine)))
    await eventually(lambda: status.version == PolicyVersion(1, 0), "labelled")
    assert (status.state, engine.labels) == (NodeState.READY, ["1.0"])
    reads = announced.reads
    await eventually(lambda: announced.reads > reads, "it looks for the next one")
    follow.cancel()
    await asyncio.gather(follow, return_exceptions=True)


async def test_a_look_at_an_older_epoch_does_not_lower_the_highest_one() -> None:
    announced = Announcements(epoch=1)
    node, status = following(announced)
    node.highest_epoch = 2  # a learner of epoch 2 has replaced the one that announces
    status.needs_recheck = True
    follow = asyncio.create_task(node.follow(cast(Any, Silent())))
    await eventually(lambda: announced.reads > 1, "it has looked")
    follow.cancel()
    await asyncio.gather(follow, return_exceptions=True)
    assert node.highest_epoch == 2 and not node.should_load(announced.update)
    assert status.version == PolicyVersion(0, 0)


class Holding:
    """An engine that answers, and holds a version."""

    name = "e"

    async def health(self, *, timeout_s: float) -> None:
        return None

    async def version(self) -> PolicyVersion:
        return PolicyVersion(2, 7)


@pytest.mark.parametrize(("epoch", "kept"), [(None, True), (2, True), (3, False)])
async def test_an_engine_found_again_is_used_unless_a_later_learner_announces(epoch: int | None, kept: bool) -> None:
    node, status = following(Announcements(epoch=1))
    node.highest_epoch, status.needs_recheck = 2, True
    status.transition_to(NodeState.READY, version=PolicyVersion(2, 7))
    target = None if epoch is None else Announcements(epoch).update
    assert await node._recheck_version(cast(Any, Holding()), target)
    assert node.highest_epoch == max(2, epoch or 0) and not status.needs_recheck
    expected = (NodeState.READY, PolicyVersion(2, 7)) if kept else (NodeState.SYNCING, NO_VERSION)
    assert (status.state, status.version) == expected
