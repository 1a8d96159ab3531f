"""Versions that are LoRA adapters: loaded without a pause, named in the registration, unloaded when they are old."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from learner.weights.base import in_use
from protocol.codec import decode_as, encode
from protocol.messages import NodeState, WeightUpdate
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, Fault
from tests.support.waiting import eventually

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
FILES = {"adapter_model.safetensors": b"weights", "adapter_config.json": b"{}"}


class Adaptable(FakeServer):
    """The scripted engine with SGLang's two routes for adapters."""

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in (LOAD, UNLOAD):
            return await super()._faulty(request, handler)  # type: ignore[no-any-return]
        body = await request.json()

        async def done(_: web.Request) -> web.Response:
            if request.path == LOAD and body["lora_name"] in self.adapters:
                return web.json_response({"success": False, "error_message": "it is already loaded"}, status=400)
            if request.path == LOAD:
                self.adapters[body["lora_name"]] = body["lora_path"]
            else:
                del self.adapters[body["lora_name"]]
            return web.json_response({"success": True, "error_message": "", "loaded_adapters": self.adapters})

        return await super()._faulty(request, done)  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def node(world: Any, engine: FakeServer, tmp_path: Path, **settings: Any) -> AsyncIterator[None]:
    run = RunSettings(
        id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=write_tokenizer(tmp_path / "model", "words")
    )
    given = {"poll_s": 0.02, "heartbeat_s": 0.1, "drain_s": 0.0, "probe_s": 60.0} | settings
    stop = ShutdownSignal()
    serving = asyncio.create_task(
        serve(run, NodeSettings(id="e", kind=AttachedEngine(url=engine.url), **given), stop=stop)
    )
    try:
        yield
    finally:
        stop.requested.set()
        await asyncio.wait_for(serving, 10)


def publish(world: Any, tmp_path: Path, version: PolicyVersion) -> str:
    path = world.publish_weights(tmp_path / "weights", version, files=FILES)
    update = decode_as(WeightUpdate, world.sync.hget(world.keys.target, "b"))
    world.sync.hset(world.keys.target, "b", encode(update.model_copy(update={"transport": "adapter"})))
    return str(path)


def holds(world: Any, version: PolicyVersion) -> Callable[[], bool]:
    def true() -> bool:
        info = world.registered("e")
        return info is not None and (info.state, info.version) == (NodeState.READY, version)

    return true


async def test_an_adapter_is_the_engines_version_and_nothing_pauses(world, tmp_path: Path) -> None:
    async with Adaptable() as engine, node(world, engine, tmp_path):
        for step in range(4):
            version = PolicyVersion(1, step)
            path = publish(world, tmp_path, version)
            await eventually(holds(world, version), f"READY at {version.label}")
            assert world.registered("e").adapter == version.label
            assert engine.adapters[version.label] == path
        await eventually(lambda: sorted(engine.adapters) == ["1.2", "1.3"], "older ones are unloaded")
        assert "/pause_generation" not in engine.calls and "/update_weights_from_disk" not in engine.calls
        assert world.registered("e").pause_s == 0
        # whole weights end it
        world.publish_weights(tmp_path / "weights", PolicyVersion(2, 0))
        await eventually(holds(world, PolicyVersion(2, 0)), "READY at whole weights")
        assert world.registered("e").adapter == ""


async def test_an_engine_that_refuses_an_adapter_stays_at_the_one_it_has(world, tmp_path: Path) -> None:
    async with Adaptable() as engine, node(world, engine, tmp_path):
        publish(world, tmp_path, PolicyVersion(1, 0))
        await eventually(holds(world, PolicyVersion(1, 0)), "READY")
        engine.faults[LOAD] = Fault(status=400, times=1)
        publish(world, tmp_path, PolicyVersion(1, 1))
        await eventually(lambda: "could not load adapter 1.1" in world.registered("e").detail, "it says why")
        assert holds(world, PolicyVersion(1, 0))() and world.registered("e").adapter == "1.0"
        await eventually(holds(world, PolicyVersion(1, 1)), "READY after another try")


async def test_a_node_names_the_version_whose_files_its_engine_reads(world, tmp_path: Path) -> None:
    async with Adaptable() as engine, node(world, engine, tmp_path):
        publish(world, tmp_path, PolicyVersion(1, 0))
        await eventually(holds(world, PolicyVersion(1, 0)), "READY")
        reading = engine.faults[LOAD] = Fault(hang=True)
        publish(world, tmp_path, PolicyVersion(1, 1))
        await eventually(lambda: world.registered("e").detail == "reading 1.1", "it says what is read")
        assert PolicyVersion(1, 1) in in_use([world.registered("e")]) and holds(world, PolicyVersion(1, 0))()
        reading.times = 0


async def test_an_adapter_is_not_laid_over_other_weights_than_the_initial_ones(world, tmp_path: Path) -> None:
    async with Adaptable(version="1.7") as engine, node(world, engine, tmp_path):
        publish(world, tmp_path, PolicyVersion(2, 0))
        await eventually(
            lambda: (info := world.registered("e")) and "not those of the initial model" in info.detail,
            "it says why not",
        )
        assert not engine.adapters and not holds(world, PolicyVersion(2, 0))()


@pytest.mark.parametrize("listed", [True, False])
async def test_adapters_that_another_run_has_left_are_replaced(world, tmp_path: Path, listed: bool) -> None:
    async with Adaptable() as engine, node(world, engine, tmp_path):
        engine.adapters = {"1.0": "/another/run/v1.0", "1.7": "/another/run/v1.7", "mine": "/mine"}
        if not listed:  # an engine that does not say what it has
            engine.faults["/v1/models"] = Fault(body={"data": [{"id": "policy"}]})
        path = publish(world, tmp_path, PolicyVersion(1, 0))
        await eventually(holds(world, PolicyVersion(1, 0)), "READY")
        assert engine.adapters == {"1.0": path, "mine": "/mine"} | ({} if listed else {"1.7": "/another/run/v1.7"})
