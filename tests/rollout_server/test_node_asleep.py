"""Suspended nodes, and engines whose node died: no engine serves before its version was checked again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import NodeState
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.node import agent
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.registry import Registry
from rollout_server.node.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, Fault
from tests.support.waiting import eventually

V1, V2 = PolicyVersion(1, 0), PolicyVersion(2, 0)
LEASE_S = 1.0


@pytest.fixture(autouse=True)
def no_rollout_server_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "NOTICE_S", 0.1)
    monkeypatch.setattr(agent, "FIRST_BACKOFF_S", 0.1)


def has_state(world: Any, state: NodeState, version: PolicyVersion) -> Callable[[], bool]:
    def true() -> bool:
        info = world.registered("e")
        return info is not None and (info.state, info.version) == (state, version)

    return true


def counts(world: Any) -> dict[str, float]:
    from protocol.codec import decode

    raw = world.sync.get(world.keys.metrics("node", "e"))
    return dict(decode(raw).values) if raw else {}


@contextmanager
def node_process(world: Any, tmp_path: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m rollout_server.node` beside the engine at `url`, killed at the end."""
    model = write_tokenizer(tmp_path / "model", "words")
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 64}))
    argv = [sys.executable, "-m", "rollout_server.node", f"run.id={world.keys.run}", f"run.model={model}"]
    argv += [f"run.dir={tmp_path}", "engine.id=e", "engine.kind.type=attach", f"engine.kind.url={url}"]
    argv += [f"engine.lease_s={LEASE_S}", "engine.heartbeat_s=0.2", "engine.poll_s=0.3", "engine.kind.wait_s=0.3"]
    process = subprocess.Popen(
        argv, cwd=tmp_path, stderr=subprocess.DEVNULL, env=os.environ | {"FORAY_REDIS_URL": world.url}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


ENGINE = """
import asyncio
from tests.support.fake_engine import FakeServer
async def main():
    async with FakeServer() as engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@contextmanager
def engine_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A scripted engine in a separate process, and its URL."""
    process = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.fault(11, 17)
async def test_a_node_suspended_through_an_epoch_change_does_not_offer_its_engine_at_the_old_epoch(
    world, tmp_path: Path
) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    with engine_process() as (engine, url), node_process(world, tmp_path, url) as node:
        await eventually(has_state(world, NodeState.READY, V1), "READY", 30)
        for process in (engine, node):
            process.send_signal(signal.SIGSTOP)
        await eventually(lambda: world.registered("e") is None, "the registration lapses", 15)
        world.publish_weights(tmp_path / "weights", V2)
        for process in (engine, node):
            process.send_signal(signal.SIGCONT)
        seen: list[tuple[NodeState, PolicyVersion]] = []

        def back() -> bool:
            info = world.registered("e")
            if info is not None and (not seen or seen[-1] != (info.state, info.version)):
                seen.append((info.state, info.version))
            return bool(seen) and seen[-1] == (NodeState.READY, V2)

        await eventually(back, "READY at the new epoch's version", 20)
        assert (NodeState.READY, V1) not in seen, seen
        await eventually(lambda: counts(world).get("rechecks", 0.0) >= 1.0, "it was asked what it holds")


@pytest.mark.fault(17)
async def test_an_engine_restarted_while_its_node_was_suspended_is_loaded(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    async with FakeServer() as engine:
        with node_process(world, tmp_path, engine.url) as node:
            await eventually(has_state(world, NodeState.READY, V1), "READY", 30)
            node.send_signal(signal.SIGSTOP)
            await eventually(lambda: world.registered("e") is None, "the registration lapses", 15)
            engine.version = "default"
            engine.calls.clear()
            node.send_signal(signal.SIGCONT)
            await eventually(has_state(world, NodeState.READY, V1), "READY", 20)
            assert engine.version == "1.0" and engine.calls.count("/update_weights_from_disk") == 1


async def test_an_engine_that_holds_what_it_held_is_asked_and_not_loaded_again(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    model = write_tokenizer(tmp_path / "model", "words")
    run = RunSettings(id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=model)
    quick = {"poll_s": 0.02, "heartbeat_s": 0.1, "lease_s": 0.4, "drain_s": 0.0, "probe_s": 60.0}
    stop = ShutdownSignal()
    async with FakeServer() as engine:
        settings = NodeSettings(id="e", kind=AttachedEngine(url=engine.url), **quick)
        serving = asyncio.create_task(serve(run, settings, stop=stop))
        try:
            await eventually(has_state(world, NodeState.READY, V1), "READY")
            real, began = Registry.register, time.monotonic()

            async def away(self: Registry, info: Any) -> bool:
                if time.monotonic() < began + 1.0:
                    raise RedisUnavailable("cut off")
                return await real(self, info)

            monkeypatch.setattr(Registry, "register", away)
            loads = engine.calls.count("/update_weights_from_disk")
            await eventually(lambda: world.registered("e") is None, "the registration lapses")
            await eventually(has_state(world, NodeState.READY, V1), "READY again")
            await eventually(lambda: counts(world).get("rechecks", 0.0) >= 1.0, "it was asked what it holds")
            assert engine.calls.count("/update_weights_from_disk") == loads
        finally:
            stop.requested.set()
            await asyncio.wait_for(serving, 10)


@pytest.mark.slow
@pytest.mark.fault(15, 16)
async def test_an_engine_whose_node_was_killed_in_the_middle_of_an_update_is_loaded_whole_by_the_next_node(
    world, tmp_path: Path
) -> None:
    async with FakeServer() as engine:
        with node_process(world, tmp_path, engine.url) as node:
            await eventually(has_state(world, NodeState.READY, PolicyVersion(0, 0)), "READY", 30)
            engine.faults["/update_weights_from_disk"] = Fault(hang=True, times=1)
            world.publish_weights(tmp_path / "weights", V1)
            await eventually(lambda: "/update_weights_from_disk" in engine.calls, "the load has begun")
            node.kill()
            assert engine.paused and engine.version == "default", "its label says nothing of what it holds"
        await eventually(lambda: world.registered("e") is None, "the registration lapses", 15)
        engine.calls.clear()
        seen: list[NodeState] = []
        with node_process(world, tmp_path, engine.url):
            await eventually(
                lambda: (info := world.registered("e")) and (seen.append(info.state) or info.state is NodeState.READY),
                "READY",
                30,
            )
            assert has_state(world, NodeState.READY, V1)() and engine.version == "1.0" and not engine.paused
            first = engine.calls.index("/continue_generation")
            assert "/update_weights_from_disk" in engine.calls[:first], "loaded whole before it went on"
            await eventually(lambda: counts(world).get("found_paused") == 1.0, "it was found paused")
