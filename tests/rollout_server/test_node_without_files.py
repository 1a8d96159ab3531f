"""A node whose host does not have the announced files: it waits for a broadcast, takes part from any state, and
generates only with what was announced. The engine is scripted, the test is the learner.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import encode
from protocol.messages import NEEDS_BROADCAST, NodeState, WeightUpdate
from protocol.versions import PolicyVersion
from tests.rollout_server.test_node_distributed import (
    BEGIN,
    BUCKET,
    CHECK,
    CONTINUE,
    DISK,
    END,
    FLUSH,
    JOIN,
    LABEL,
    PAUSE,
    PROOF,
    V0,
    V1,
    V2,
    has_state,
    ring,
)
from tests.support.fake_engine import Fault
from tests.support.waiting import eventually

V3 = PolicyVersion(1, 2)
SGLANG = {"version": "0.5.23", "tp_size": 1, "pp_size": 1}


def announce(world: Any, version: PolicyVersion, *, broadcast: bool = True) -> None:
    """The learner has written the version, in a directory of its own host."""
    update = WeightUpdate(
        run=world.keys.run, epoch=version.epoch, step=version.step, digest="d", path="/nowhere/v", broadcast=broadcast
    )
    world.sync.hset(world.keys.target, mapping={"b": encode(update), "state": "ready"})


async def waits(world: Any, state: NodeState, version: PolicyVersion) -> None:
    def true() -> bool:
        info = world.registered("e")
        return info is not None and info.needs_broadcast and (info.state, info.version) == (state, version)

    await eventually(true, f"{state} at {version.label}, and it waits for a broadcast")


async def test_a_follower_keeps_its_version_reports_why_and_joins_the_view_of_the_announced_one(
    world: Any, tmp_path: Path
) -> None:
    async with ring(world, tmp_path, facts=SGLANG) as (engine, learner):
        announce(world, V2)
        await waits(world, NodeState.READY, V1)
        assert world.registered("e").detail == f"{NEEDS_BROADCAST} /nowhere/v is not on this host, or cannot be read"
        await asyncio.sleep(0.3)
        assert engine.swap() == [] and world.registered("e").needs_broadcast
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        assert (await learner.hears("loaded")).touched
        await asyncio.sleep(0.1)
        assert engine.paused and has_state(world, NodeState.LOADING, V1)(), "that it is announced does not commit it"
        learner.say("commit", buckets=())
        await eventually(has_state(world, NodeState.READY, V2), "READY at V2")
        assert engine.swap() == [JOIN, PAUSE, BEGIN, BUCKET, BUCKET, END, CHECK, FLUSH, LABEL, CONTINUE]
        assert not world.registered("e").detail and DISK not in engine.calls


async def test_an_engine_joins_although_versions_follow_faster_than_its_retries(world: Any, tmp_path: Path) -> None:
    steps = itertools.count(2)

    def waits_for_one() -> bool:
        announce(world, PolicyVersion(1, next(steps)))
        info = world.registered("e")
        return info is not None and info.needs_broadcast and info.state is NodeState.READY

    async with ring(world, tmp_path, facts=SGLANG):
        await eventually(waits_for_one, "it waits for a broadcast", 10)


async def test_without_broadcasts_it_is_quarantined(world: Any, tmp_path: Path) -> None:
    async with ring(world, tmp_path, facts=SGLANG):
        announce(world, V2, broadcast=False)
        await eventually(has_state(world, NodeState.QUARANTINED, V1), "QUARANTINED")
        assert "cannot be verified" in world.registered("e").detail


@pytest.mark.slow
@pytest.mark.parametrize("end", ["abort", "another version", "deadline"])
async def test_a_view_that_fails_leaves_it_waiting_in_place_and_the_next_one_mends_it(
    world: Any, tmp_path: Path, end: str
) -> None:
    async with ring(world, tmp_path, facts=SGLANG) as (engine, learner):
        announce(world, V2)
        await waits(world, NodeState.READY, V1)
        incarnation = world.registered("e").incarnation
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer", left_s=3.0 if end == "deadline" else 10.0)
        await learner.hears("loaded")
        if end == "abort":
            learner.say("abort", buckets=())
        elif end == "another version":
            announce(world, V3)
        assert (await learner.hears("failed")).touched
        await waits(world, NodeState.QUARANTINED, V0)
        reason = {"abort": "the learner aborted it", "another version": "another version was announced"}
        assert f"1.1 was received in part: {reason.get(end, 'the deadline')}" in world.registered("e").detail
        await asyncio.sleep(0.3)
        assert engine.paused and CONTINUE not in engine.calls and world.registered("e").needs_broadcast
        # the next view, of the next version
        engine.calls.clear()
        learner.say("prepare", number=2, step=3, group="h")
        await learner.hears("prepared")
        learner.say("transfer")
        await learner.hears("loaded")
        learner.announce(PolicyVersion(1, 3))
        await eventually(has_state(world, NodeState.READY, PolicyVersion(1, 3)), "READY")
        assert world.registered("e").incarnation == incarnation, "the engine was not restarted"


@pytest.mark.slow
async def test_a_paused_engine_that_waits_is_not_taken_for_hung(world: Any, tmp_path: Path) -> None:
    async with ring(world, tmp_path, facts=SGLANG, probe_s=0.2, hang_s=2.0) as (engine, learner):
        announce(world, V2)
        await waits(world, NodeState.READY, V1)
        incarnation = world.registered("e").incarnation
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        await learner.hears("loaded")
        learner.say("abort", buckets=())
        await waits(world, NodeState.QUARANTINED, V0)
        engine.faults["/health"] = engine.faults["/health_generate"] = Fault(status=503)  # as a paused SGLang
        await asyncio.sleep(3.0)
        assert engine.paused and world.registered("e").incarnation == incarnation
        await waits(world, NodeState.QUARANTINED, V0)


async def test_the_proof_counts_as_a_change_of_an_engine_without_a_version(world: Any, tmp_path: Path) -> None:
    async with ring(world, tmp_path, facts=SGLANG) as (engine, learner):
        announce(world, V2)
        await waits(world, NodeState.READY, V1)
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        await learner.hears("loaded")
        learner.say("abort", buckets=())
        await waits(world, NodeState.QUARANTINED, V0)
        engine.calls.clear()
        learner.say("prepare", number=2, group="h", proof=PROOF)
        await learner.hears("prepared")
        assert engine.swap()[-4:] == [PAUSE, BEGIN, BUCKET, END] and engine.paused, "it must not generate"
        learner.say("abort", buckets=())
        assert (await learner.hears("failed")).touched
        assert CONTINUE not in engine.calls
