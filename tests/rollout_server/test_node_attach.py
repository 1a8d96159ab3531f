"""Attaching to a running engine: what is refused with which message, and that the engine may come and go."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import UserError
from protocol.messages import NodeState
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.node import agent
from rollout_server.node.attach import PROBE_TEXT
from rollout_server.node.cli import attached
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, Fault
from tests.support.waiting import eventually

V1 = PolicyVersion(1, 0)


@pytest.fixture(autouse=True)
def no_rollout_server_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "NOTICE_S", 0.1)
    monkeypatch.setattr(agent, "FIRST_BACKOFF_S", 0.1)


def settings(url: str, **kind: Any) -> NodeSettings:
    quick = {"poll_s": 0.02, "heartbeat_s": 0.1, "probe_s": 0.1, "probe_timeout_s": 0.3, "hang_s": 0.8, "drain_s": 0.1}
    return NodeSettings(id="e", kind=AttachedEngine(url=url, **{"wait_s": 0.2, **kind}), **quick)


@pytest.mark.parametrize("kind", [{"type": "cpu"}, {"type": "sglang"}, {"type": "attach", "url": "http://e:1"}])
def test_an_engine_runs_at_least_one_request_at_a_time(kind: dict[str, Any]) -> None:
    def made(count: int) -> NodeSettings:
        return NodeSettings.model_validate({"kind": kind | {"max_running": count}})

    assert made(1).kind.max_running == 1
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        made(0)


def run_of(world, tmp_path: Path) -> RunSettings:
    model = write_tokenizer(tmp_path / "model", "words")
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 64}))
    return RunSettings(id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=model)


async def refusal(world, tmp_path: Path, url: str) -> UserError:
    """The error that a user gets when the node of `url` is started."""
    with pytest.raises(UserError) as caught:
        await asyncio.wait_for(serve(run_of(world, tmp_path), settings(url), stop=ShutdownSignal()), 10)
    assert world.registered("e") is None, "what was refused is not on the list"
    return caught.value


async def test_an_address_without_a_listener(world, tmp_path: Path) -> None:
    async with FakeServer() as engine:
        pass
    error = await refusal(world, tmp_path, engine.url)
    assert error.what == f"no engine answers at {engine.url}" and "connect call failed" in error.why.lower()


@pytest.mark.parametrize(
    ("model_info", "what"),
    [
        (Fault(status=404), "is not an engine"),
        (Fault(body={"status": "ok", "passages": 7}), "is not an engine"),
        (Fault(body=["a", "list"]), "is not an engine"),
        (Fault(status=401), "requires a key"),
        (Fault(body={"weight_version": "default", "model_type": "llama"}), "a different model"),
        (
            Fault(body={"weight_version": "default", "model_type": "qwen2", "vocab_size": 65}),
            "a different model",
        ),
    ],
)
async def test_something_else_than_the_runs_engine_is_refused(
    model_info: Fault, what: str, world, tmp_path: Path
) -> None:
    async with FakeServer() as engine:
        engine.faults["/model_info"] = model_info
        error = await refusal(world, tmp_path, engine.url)
    assert what in error.what and engine.url in error.what and error.todo


async def test_a_key_that_does_not_open_the_control_routes_is_refused_at_once(world, tmp_path: Path) -> None:
    async with FakeServer() as engine:
        engine.faults["/abort_request"] = Fault(status=401)
        error = await refusal(world, tmp_path, engine.url)
    assert "requires a key" in error.what
    assert "FORAY_ENGINE_API_KEY" in error.todo and "FORAY_ENGINE_ADMIN_KEY" in error.todo


@pytest.mark.fault(22)
async def test_a_different_tokenizer_is_refused_by_its_files_or_its_ids(world, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", "bytes")
    async with FakeServer() as engine:
        engine.faults["/model_info"] = Fault(body={"weight_version": "default", "tokenizer_path": str(other)})
        error = await refusal(world, tmp_path, engine.url)
        assert "a different tokenizer" in error.what and str(other) in error.why
        # its files are on another machine
        engine.faults["/model_info"] = Fault(body={"weight_version": "default", "model_path": "/elsewhere"})
        engine.faults["/tokenize"] = Fault(body={"tokens": load_tokenizer(other).encode_trusted(PROBE_TEXT)})
        assert "a different tokenizer" in (await refusal(world, tmp_path, engine.url)).what


async def test_the_same_tokenizer_is_accepted(world, tmp_path: Path) -> None:
    run = run_of(world, tmp_path)
    async with FakeServer() as engine:
        engine.faults["/tokenize"] = Fault(body={"tokens": load_tokenizer(run.model).encode_trusted(PROBE_TEXT)})
        stop = ShutdownSignal()
        node = asyncio.create_task(serve(run, settings(engine.url), stop=stop))
        await eventually(lambda: (info := world.registered("e")) and info.state is NodeState.READY, "READY")
        stop.requested.set()
        await asyncio.wait_for(node, 10)
        assert engine.calls.count("/tokenize") == 1


@pytest.mark.fault(17)
async def test_a_removed_engine_is_listed_again_only_with_the_right_version(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    stop = ShutdownSignal()
    async with FakeServer() as engine:
        node = asyncio.create_task(serve(run_of(world, tmp_path), settings(engine.url), stop=stop))

        def state() -> NodeState | None:
            info = world.registered("e")
            return info.state if info else None

        await eventually(lambda: state() is NodeState.READY, "READY")
        assert world.registered("e").version == V1 and engine.version == "1.0"
        await engine.stop()
        await eventually(lambda: state() is NodeState.GONE, "GONE")
        assert "waiting for it" in world.registered("e").detail
        engine.version = "default"  # its owner has restarted it, with its first weights
        seen: list[tuple[NodeState | None, PolicyVersion]] = []
        await engine.start()
        await eventually(
            lambda: seen.append((state(), world.registered("e").version)) or state() is NodeState.READY, "back"
        )
        assert seen[-1] == (NodeState.READY, V1) and engine.version == "1.0"
        assert all(version == V1 for where, version in seen if where is NodeState.READY)
        stop.requested.set()
        await asyncio.wait_for(node, 10)


@pytest.mark.slow
@pytest.mark.fault(15)
async def test_an_engine_that_was_left_in_the_middle_of_an_update_is_loaded_until_it_is_whole(
    world, tmp_path: Path
) -> None:
    stop = ShutdownSignal()
    async with FakeServer() as engine:
        node = asyncio.create_task(serve(run_of(world, tmp_path), settings(engine.url), stop=stop))
        await eventually(lambda: (info := world.registered("e")) and info.state is NodeState.READY, "READY")
        failing = engine.faults["/update_weights_from_disk"] = Fault(status=500)
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(lambda: world.registered("e").state is NodeState.QUARANTINED, "QUARANTINED")
        engine.faults["/health_generate"] = Fault(status=503)  # as engines do while they are paused
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            assert engine.paused, "half of a version never generates"
            assert world.registered("e").state is not NodeState.READY
            await asyncio.sleep(0.02)
        del engine.faults["/health_generate"]
        failing.times = 0
        await eventually(lambda: world.registered("e").state is NodeState.READY, "READY in the end", 20)
        assert world.registered("e").version == V1 and engine.version == "1.0" and not engine.paused
        stop.requested.set()
        await asyncio.wait_for(node, 10)


def test_attaching_is_sugar_for_a_kind() -> None:
    url = "http://10.0.0.7:30000"
    assert attached({}, url) == {"engine": {"kind": {"type": "attach", "url": url}}}
    tree = {"run": {"id": "r"}, "engine": {"role": "eval", "kind": {"type": "cpu", "threads": 2}}}
    assert attached(tree, url)["engine"] == {"role": "eval", "kind": {"type": "attach", "url": url}}
    assert tree["engine"]["kind"] == {"type": "cpu", "threads": 2}
    kept = attached({"engine": {"kind": {"type": "attach", "url": "http://old", "max_running": 8}}}, url)
    assert kept["engine"]["kind"] == {"type": "attach", "url": url, "max_running": 8}


async def test_the_command_says_what_is_wrong_and_exits_with_2(world, tmp_path: Path) -> None:
    run = run_of(world, tmp_path)
    async with FakeServer() as engine:
        engine.faults["/model_info"] = Fault(status=401)
        argv = [sys.executable, "-m", "foray", "engine", "--attach", engine.url, f"run.model={run.model}"]
        argv += [f"run.id={run.id}", f"run.dir={run.dir}"]
        env = os.environ | {"FORAY_REDIS_URL": world.url}
        done = await asyncio.to_thread(subprocess.run, argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"error: the engine at {engine.url} requires a key" in done.stderr and "Traceback" not in done.stderr
