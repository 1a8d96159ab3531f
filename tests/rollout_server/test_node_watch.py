"""A hanging engine is detected, killed with its process tree and restarted at the target version."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from protocol.messages import EngineInfo, NodeState
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.node import agent
from rollout_server.node.config import AttachedEngine, CpuEngine, NodeSettings, SglangEngine
from rollout_server.node.guard import descendants
from rollout_server.node.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, Fault
from tests.support.waiting import eventually

V1, V2 = PolicyVersion(1, 0), PolicyVersion(1, 1)

ENGINE = '''
"""Built like SGLang: an HTTP process, and a scheduler in a separate process that does the work."""
import argparse, asyncio, os, socket, sys
from pathlib import Path
from aiohttp import web

parser = argparse.ArgumentParser()
for flag in ("--model-path", "--host", "--port", "--weight-version"):
    parser.add_argument(flag)
args, _ = parser.parse_known_args()
here, version = Path(__file__).parent, [args.weight_version]
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    while byte := theirs.recv(1):  # the scheduler
        theirs.send(byte)
    os._exit(0)
theirs.close()
ours.setblocking(False)
with (here / "launched").open("a") as file:
    file.write(args.weight_version + "\\n")
running, ended = [0], asyncio.Event()

async def health(request):
    with (here / "probes").open("a") as file:
        file.write("probe\\n")
    if (here / "loading").exists():
        return web.Response(status=503)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ours, b"x")
    await loop.sock_recv(ours, 1)
    return web.Response()

async def generate(request):
    body = await request.json()
    if "sampling_params" in body:  # the node's warm-up
        (here / "warmed").write_text(str(body["sampling_params"]))
        while (here / "compiling").exists():
            await asyncio.sleep(0.02)
        return web.json_response({"output_ids": [7]})
    running[0] += 1
    await ended.wait()
    running[0] -= 1
    return web.json_response({"output_ids": [7, 8], "meta_info": {"finish_reason": {"type": "abort"}}})

async def abort(request):
    body = await request.json()
    (here / "aborted").write_text(str(body))
    ended.set()
    return web.Response()

async def update(request):
    body = await request.json()
    if (here / "slow").exists():
        await asyncio.sleep(3)
    if (here / "fail").exists():
        return web.json_response({"success": False, "message": "out of memory"}, status=400)
    version[0] = body["weight_version"]
    return web.json_response({"success": True, "message": ""})

async def metrics(request):
    lines = ["# TYPE sglang:num_retracted_requests_total counter"]
    lines += [f'sglang:num_retracted_requests_total{{tp_rank="{rank}"}} {rank + 1}.0' for rank in (0, 1)]
    return web.Response(text="\\n".join(lines))

def fixed(answer):
    async def handler(request):
        return web.json_response(answer())
    return handler

app = web.Application()
loads = lambda: {"loads": [{"num_running_reqs": running[0], "max_total_num_tokens": 4096, "max_running_requests": 24}]}
app.add_routes([
    web.get("/health_generate", health), web.post("/generate", generate), web.post("/abort_request", abort),
    web.post("/update_weights_from_disk", update), web.get("/v1/loads", fixed(loads)),
    web.get("/model_info", fixed(lambda: {"weight_version": version[0]})),
    web.get("/server_info", fixed(lambda: {"tp_size": 2, "version": "0.5.21", "enable_lora": True,
                                          "disable_overlap_schedule": "--disable-overlap-schedule" in sys.argv})),
    web.get("/metrics", metrics), web.post("/pause_generation", fixed(dict)),
    web.post("/continue_generation", fixed(dict)),
])
web.run_app(app, host=args.host, port=int(args.port), print=None)
'''


@pytest.fixture(autouse=True)
def no_rollout_server_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "NOTICE_S", 0.1)
    monkeypatch.setattr(agent, "FIRST_BACKOFF_S", 0.1)


@contextlib.asynccontextmanager
async def node(
    world, tmp_path: Path, kind: AttachedEngine | CpuEngine | SglangEngine, **settings
) -> AsyncIterator[ShutdownSignal]:
    run = RunSettings(
        id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=write_tokenizer(tmp_path / "model", "words")
    )
    quick = {"poll_s": 0.02, "heartbeat_s": 0.1, "probe_s": 0.1, "probe_timeout_s": 0.3, "hang_s": 0.8, "drain_s": 0.1}
    stop = ShutdownSignal()
    task = asyncio.create_task(serve(run, NodeSettings(id="e", kind=kind, **(quick | settings)), stop=stop))
    try:
        yield stop
    finally:
        stop.requested.set()
        await asyncio.wait_for(task, 20)


def launched(tmp_path: Path) -> SglangEngine:
    (tmp_path / "launch.py").write_text(ENGINE)
    return SglangEngine(python=sys.executable, launcher=tmp_path / "launch.py")


def launches(tmp_path: Path) -> list[str]:
    return (tmp_path / "launched").read_text().split()


def has_state(world, state: NodeState, version: PolicyVersion) -> Callable[[], bool]:
    def true() -> bool:
        info = world.registered("e")
        return info is not None and (info.state, info.version) == (state, version)

    return true


def info(world) -> EngineInfo:
    found = world.registered("e")
    assert found is not None
    return found


def engine_tree() -> list[int]:
    """[guard, HTTP side, scheduler] of the only engine below this process."""
    found = [pid for pid in descendants(os.getpid()) if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return [found[0], *descendants(found[0])]


def counts(world) -> dict[str, float]:
    from protocol.codec import decode

    raw = world.sync.get(world.keys.metrics("node", "e"))
    return dict(decode(raw).values) if raw else {}


async def test_what_the_engine_says_of_itself_is_registered(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    loading, probes = tmp_path / "loading", tmp_path / "probes"
    loading.touch()
    async with node(world, tmp_path, launched(tmp_path), pause_mode="in_place"):
        await eventually(probes.exists, "it is asked whether it has loaded", 20)
        began, before = time.monotonic(), len(probes.read_text().splitlines())
        await eventually(lambda: info(world).detail == f"launching with {V1.label}", "what it does is registered")
        assert has_state(world, NodeState.SYNCING, V1)()
        await asyncio.sleep(0.5)
        asked, took_s = len(probes.read_text().splitlines()) - before, time.monotonic() - began
        assert asked <= 1 + took_s / 0.1, "ten times a second"
        loading.unlink()
        await eventually(has_state(world, NodeState.READY, V1), "READY")
        assert info(world).detail == ""
        await eventually(lambda: info(world).retractions == 3, "its counter of retractions")
        there = info(world)
    assert (there.kind, there.ranks, there.max_tokens, there.max_running) == ("sglang", 2, 4096, 24)
    assert there.transports == ("disk", "distributed", "adapter")


async def test_an_engine_samples_as_the_run_does_before_it_is_ready(world, tmp_path: Path) -> None:
    # SGLang compiles its sampling at the first request with top_p, for longer than hang_s
    world.publish_weights(tmp_path / "weights", V1)
    compiling, warmed = tmp_path / "compiling", tmp_path / "warmed"
    compiling.touch()
    async with node(world, tmp_path, launched(tmp_path), hang_s=0.3):
        await eventually(lambda: warmed.exists() and warmed.read_text().endswith("}"), "asked for a token", 20)
        assert "'top_p': 1.0" in warmed.read_text() and "'temperature': 1.0" in warmed.read_text()
        await asyncio.sleep(1.0)  # longer than hang_s
        assert has_state(world, NodeState.SYNCING, V1)() and launches(tmp_path) == ["1.0"]
        compiling.unlink()
        await eventually(has_state(world, NodeState.READY, V1), "READY")
    assert launches(tmp_path) == ["1.0"]


@pytest.mark.slow
@pytest.mark.fault(19)
@pytest.mark.parametrize("stopped", ["the scheduler behind a live HTTP port", "the whole tree, guard included"])
async def test_a_hanging_engine_is_killed_and_restarted_at_the_target(
    stopped: str, world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # longer than this test waits: a hung engine must be killed without being asked first
    monkeypatch.setattr(agent, "STOP_S", 600.0)
    world.publish_weights(tmp_path / "weights", V1)
    async with node(world, tmp_path, launched(tmp_path)):
        await eventually(has_state(world, NodeState.READY, V1), "READY")
        world.publish_weights(tmp_path / "weights", V2)
        await eventually(has_state(world, NodeState.READY, V2), "READY at the next version")
        tree, born = engine_tree(), info(world).incarnation
        for pid in tree[2:] if "scheduler" in stopped else tree:
            os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: info(world).state is NodeState.SUSPECT, "SUSPECT, with its reason", 60)
        assert "hung" in info(world).detail
        await eventually(has_state(world, NodeState.READY, V2), "READY again", 60)
        assert launches(tmp_path) == ["1.0", "1.1"] and info(world).incarnation != born
        assert not any(Path(f"/proc/{pid}").exists() for pid in tree)
        await eventually(lambda: (counts(world).get("hangs"), counts(world).get("restarts")) == (1.0, 1.0), "counted")
        ((_, event),) = world.sync.xrange(world.keys.events)
        assert event[b"text"].startswith(b"hung: no sign of life for ")
        assert event[b"text"].endswith(b"; its node launches it again")


@pytest.mark.slow
async def test_a_busy_engine_that_answers_late_is_no_hanging_one(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, tmp_path, AttachedEngine(url=engine.url)):
        await eventually(has_state(world, NodeState.READY, PolicyVersion(0, 0)), "READY")
        engine.faults["/health_generate"] = Fault(hang=True)
        moving = engine.faults["/v1/loads"] = Fault(body={"loads": [{"num_used_tokens": 0}]})
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            moving.body["loads"][0]["num_used_tokens"] += 1
            assert info(world).state is NodeState.READY
            await asyncio.sleep(0.05)
        await eventually(lambda: info(world).state is not NodeState.READY, "and then the figures stand still")


async def test_an_engine_that_is_being_updated_is_no_hanging_one(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, tmp_path, AttachedEngine(url=engine.url), update_timeout_s=2.0):
        await eventually(has_state(world, NodeState.READY, PolicyVersion(0, 0)), "READY")
        engine.faults["/health_generate"] = Fault(hang=True)
        engine.faults["/update_weights_from_disk"] = Fault(hang=True, times=1)
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(lambda: info(world).state is NodeState.LOADING, "the swap has begun")
        engine.faults["/v1/loads"] = Fault(status=500)
        await asyncio.sleep(1.5)
        assert info(world).state is NodeState.LOADING, "silent on purpose"


@pytest.mark.slow
@pytest.mark.fault(19)
async def test_an_engine_that_is_stopped_in_the_middle_of_an_update_is_found(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    kind = launched(tmp_path)
    async with node(world, tmp_path, kind, update_timeout_s=60.0):
        await eventually(has_state(world, NodeState.READY, V1), "READY")
        tree = engine_tree()
        (tmp_path / "slow").touch()
        world.publish_weights(tmp_path / "weights", V2)
        await eventually(lambda: info(world).state is NodeState.LOADING, "the swap has begun")
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        await eventually(
            lambda: info(world).state is NodeState.QUARANTINED, "found long before the update's deadline", 5
        )
        assert "hung" in info(world).detail
        await eventually(has_state(world, NodeState.READY, V2), "READY, started with the target")


@pytest.mark.slow
async def test_a_launched_engine_with_part_of_an_update_is_restarted(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    async with node(world, tmp_path, launched(tmp_path)):
        await eventually(has_state(world, NodeState.READY, V1), "READY")
        (tmp_path / "fail").touch()
        seen: set[NodeState] = set()
        world.publish_weights(tmp_path / "weights", V2)

        def restarted() -> bool:
            there = info(world)
            # the version it held is not to be routed to: what it holds now is neither
            if there.state is NodeState.READY and "quarantined" in seen:
                assert there.version == V2
            seen.add(there.state)
            return has_state(world, NodeState.READY, V2)()

        await eventually(restarted, "READY at the version that could not be loaded, by a launch with it")
        assert NodeState.QUARANTINED in seen and launches(tmp_path) == ["1.0", "1.1"]


async def test_a_drain_aborts_what_does_not_finish(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    async with aiohttp.ClientSession() as session:
        async with node(world, tmp_path, launched(tmp_path), drain_s=0.6) as stop:
            await eventually(has_state(world, NodeState.READY, V1), "READY")
            tree = engine_tree()
            turn = asyncio.create_task(session.post(info(world).url + "/generate", json={}))
            await eventually(lambda: info(world).running == 1, "a request runs")
            began = time.monotonic()
            stop.requested.set()
            await eventually(has_state(world, NodeState.DRAINING, V1), "DRAINING at once", 5)
            async with await turn as response:
                assert (await response.json())["output_ids"] == [7, 8], "the tokens it had"
            assert time.monotonic() - began >= 0.5, "after it was given the time to finish"
            assert "True" in (tmp_path / "aborted").read_text()
            await eventually(lambda: world.registered("e") is None, "deregistered")
        assert not any(Path(f"/proc/{pid}").exists() for pid in tree)


@pytest.mark.slow
async def test_a_second_signal_hurries_a_drain(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    async with aiohttp.ClientSession() as session, node(world, tmp_path, launched(tmp_path), drain_s=60.0) as stop:
        await eventually(has_state(world, NodeState.READY, V1), "READY")
        turn = asyncio.create_task(session.post(info(world).url + "/generate", json={}))
        await eventually(lambda: info(world).running == 1, "a request runs")
        stop.requested.set()
        await eventually(has_state(world, NodeState.DRAINING, V1), "DRAINING at once", 5)
        stop.forced.set()
        async with await asyncio.wait_for(turn, 10) as response:
            assert (await response.json())["output_ids"] == [7, 8]
        await eventually(lambda: world.registered("e") is None, "deregistered", 15)


async def test_a_version_that_an_engine_cannot_be_launched_with_is_loaded_after_the_launch(
    world, tmp_path: Path
) -> None:
    kind, (model, v1) = launched(tmp_path), (tmp_path / "model", PolicyVersion(1, 0))
    script = tmp_path / "launch.py"
    script.write_text("import sys\nif any('v1.0' in word for word in sys.argv): sys.exit(2)\n" + script.read_text())
    model.mkdir()
    (model / "config.json").write_text("{}")
    world.publish_weights(tmp_path / "weights", v1)
    async with node(world, tmp_path, kind):
        await eventually(has_state(world, NodeState.READY, v1), "READY", 20)
        assert launches(tmp_path) == ["0.0"] and world.registered("e").updates == 1


async def test_an_engine_that_cannot_be_started_for_now_is_tried_again(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, full, real = launched(tmp_path), [OSError(28, "No space left on device")] * 2, tempfile.TemporaryDirectory

    def directory(**given: Any) -> Any:
        if full:
            raise full.pop()
        return real(**given)

    monkeypatch.setattr("rollout_server.node.process.tempfile.TemporaryDirectory", directory)
    world.publish_weights(tmp_path / "weights", PolicyVersion(1, 0))
    async with node(world, tmp_path, kind):
        await eventually(lambda: (seen := world.registered("e")) and "No space left" in seen.detail, "it says why")
        await eventually(has_state(world, NodeState.READY, PolicyVersion(1, 0)), "READY in the end", 20)
