"""One engine id, one node: a second one ends, and the successor of a node that has ended takes over."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from protocol.codec import encode
from protocol.errors import UserError
from protocol.messages import EngineInfo, NodeState
from protocol.runtime.lifecycle import ShutdownSignal, place
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.process import seed_of
from rollout_server.node.registry import Registry
from rollout_server.node.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer
from tests.support.waiting import eventually

LEASE_S = 0.6


def start(world, tmp_path: Path, url: str, stop: ShutdownSignal) -> asyncio.Task[None]:
    model = tmp_path / "model"
    if not model.exists():
        write_tokenizer(model, "words")
    run = RunSettings(id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=model)
    quick = {"poll_s": 0.02, "heartbeat_s": 0.1, "lease_s": LEASE_S, "drain_s": 0.0, "probe_s": 60.0}
    return asyncio.create_task(serve(run, NodeSettings(id="e", kind=AttachedEngine(url=url), **quick), stop=stop))


def ready(world, url: str = "") -> bool:
    """One read: between two a lease may end."""
    info = world.registered("e")
    return info is not None and info.state is NodeState.READY and url in ("", info.url)


async def test_a_second_node_of_one_id_ends_and_the_first_is_registered_throughout(world, tmp_path: Path) -> None:
    stop = ShutdownSignal()
    async with FakeServer() as first, FakeServer() as second:
        node = start(world, tmp_path, first.url, stop)
        await eventually(lambda: ready(world), "READY")
        incarnation, seen = world.registered("e").incarnation, set()
        twin = start(world, tmp_path, second.url, ShutdownSignal())
        await eventually(
            lambda: seen.add((info := world.registered("e")) and (info.url, info.incarnation)) or twin.done(), "it ends"
        )
        with pytest.raises(UserError, match="another node has registered the engine e"):
            await twin
        assert seen == {(first.url, incarnation)} and not second.calls
        assert ready(world), "the end of the second one has not removed the registration of the first"
        stop.requested.set()
        await asyncio.wait_for(node, 10)
        assert world.registered("e") is None


@pytest.mark.parametrize("left", ["a dead process of this machine", "a process elsewhere"])
async def test_the_successor_of_a_killed_node_takes_over(world, tmp_path: Path, left: str) -> None:
    here = left == "a dead process of this machine"
    owner = f"{place()}:{os.getpid()}:1" if here else "elsewhere/1/2:3:4"
    info = EngineInfo(id="e", url="http://127.0.0.1:1", state=NodeState.READY, incarnation="a")
    world.sync.hset(world.keys.engine("e"), mapping={"b": encode(info), "owner": owner})
    world.sync.pexpire(world.keys.engine("e"), int(LEASE_S * 1000))
    stop, began = ShutdownSignal(), time.monotonic()
    async with FakeServer() as engine:
        node = start(world, tmp_path, engine.url, stop)
        await eventually(lambda: ready(world, engine.url), "READY")
        assert here or time.monotonic() - began >= LEASE_S / 2, "not before the lease has ended"
        stop.requested.set()
        await asyncio.wait_for(node, 10)


async def test_a_node_whose_user_may_not_read_registrations_registers_as_before(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client()
    batch = client.batch

    async def denied(*commands: tuple[object, ...], **given: object) -> list[object]:
        if commands[0][0] == "HGET":
            raise UserError("Redis rejected the user, the password or a command")
        return await batch(*commands, **given)

    monkeypatch.setattr(client, "batch", denied)
    registry = Registry(client, lease_s=9.0)
    assert await registry.register(EngineInfo(id="e", url="http://127.0.0.1:1", state=NodeState.READY))
    await registry.deregister("e")
    assert world.registered("e") is None


async def test_target_and_view_are_read_in_one_transaction(own_world) -> None:
    """Between two reads the learner could announce a version, and a node would follow the view of another one."""
    registry = Registry(own_world.client(), lease_s=9.0)
    own_world.target(PolicyVersion(1, 4))
    await registry.target_view()
    own_world.sync.config_resetstat()
    found = await registry.target_view()
    calls = {name: stat["calls"] for name, stat in own_world.sync.info("commandstats").items()}
    assert found.target is not None and found.target.version == PolicyVersion(1, 4)
    assert (calls["cmdstat_multi"], calls["cmdstat_exec"], calls["cmdstat_get"]) == (1, 1, 3)


def test_each_incarnation_of_each_engine_has_another_seed() -> None:
    seeds = {seed_of(run, name, born) for run in (0, 1) for name in ("a", "b") for born in ("1", "2")}
    assert len(seeds) == 8 and all(0 <= seed < 1 << 32 for seed in seeds)
    assert seed_of(1, "a", "2") == seed_of(1, "a", "2")
