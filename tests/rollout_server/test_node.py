"""The agent of an engine: registration, weight updates and their failures, death and restart, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from learner.weights.base import in_use
from protocol.errors import UserError
from protocol.messages import NodeState, Sampling
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion, VersionPin
from rollout_server.engine.base import GenerateRequest
from rollout_server.engine.client import SglangClient
from rollout_server.node import agent
from rollout_server.node.config import AttachedEngine, NodeSettings, SglangEngine
from rollout_server.node.guard import descendants
from rollout_server.node.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, Fault
from tests.support.waiting import eventually

SWAP = ["/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"]
V0, V1, V2 = PolicyVersion(0, 0), PolicyVersion(1, 0), PolicyVersion(1, 1)


@pytest.fixture(autouse=True)
def no_rollout_server_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "NOTICE_S", 0.1)


@contextlib.asynccontextmanager
async def node(world, engine: FakeServer, tmp_path: Path, **settings) -> AsyncIterator[ShutdownSignal]:
    """A node attached to `engine` under the name `e`, stopped in order at the end."""
    run = RunSettings(
        id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=write_tokenizer(tmp_path / "model", "words")
    )
    given = {"poll_s": 0.02, "heartbeat_s": 0.1, "drain_s": 3.0, "probe_s": 0.1, "probe_timeout_s": 0.5} | settings
    stop = ShutdownSignal()
    node = asyncio.create_task(
        serve(run, NodeSettings(id="e", kind=AttachedEngine(url=engine.url), **given), stop=stop)
    )
    try:
        yield stop
    finally:
        stop.requested.set()
        await asyncio.wait_for(node, 10)


def has_state(world, state: NodeState, version: PolicyVersion = V0) -> Callable[[], bool]:
    def true() -> bool:
        info = world.registered("e")
        return info is not None and (info.state, info.version) == (state, version)

    return true


async def test_an_engine_is_ready_before_there_is_a_target_and_is_gone_after_the_stop(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY at (0, 0)")
        info = world.registered("e")
        assert (info.url, info.kind, info.role) == (engine.url, "attach", "rollout") and info.tokenizer
        assert 0 < world.sync.pttl(world.keys.engine("e")) <= 10_000
        assert world.sync.zscore(world.keys.engines, "e") > world.sync.time()[0]
        await eventually(lambda: world.sync.exists(world.keys.metrics("node", "e")), "metrics are there")
    assert world.registered("e") is None and world.sync.zscore(world.keys.engines, "e") is None
    assert not world.sync.exists(world.keys.metrics("node", "e"))


async def test_a_new_version_is_loaded_read_back_and_announced(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path, probe_s=60.0, heartbeat_s=60.0):
        await eventually(has_state(world, NodeState.READY), "READY")
        engine.calls.clear()
        path = world.publish_weights(tmp_path / "weights", V1)
        await eventually(has_state(world, NodeState.READY, V1), "READY at the target")
        assert [call for call in engine.calls if call != "/v1/loads"] == SWAP
        assert (engine.version, engine.loaded, engine.paused) == ("1.0", str(path), False)
        assert world.registered("e").updates == 1 and world.registered("e").pause_s > 0
        world.publish_weights(tmp_path / "weights", V2)
        await eventually(has_state(world, NodeState.READY, V2), "READY at the next one")


async def test_a_stop_that_meets_the_engines_end_is_still_a_stop(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found_dead_when_told_to_stop(watchdog: agent.Watchdog) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise agent.EngineLost("at the same moment")

    monkeypatch.setattr(agent.Watchdog, "watch", found_dead_when_told_to_stop)
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
    assert world.registered("e") is None


@pytest.mark.parametrize("left", ["1.0", "1.50", "9.0"])
async def test_an_engine_that_another_run_has_left_is_loaded_anew_whatever_its_label(
    left: str, world, tmp_path: Path
) -> None:
    async with FakeServer(version=left) as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.SYNCING), "it holds no version of this run")
        await eventually(lambda: f"found with {left}" in world.registered("e").detail, "it says why")
        seen = set()
        path = world.publish_weights(tmp_path / "weights", V1)
        await eventually(
            lambda: seen.add((info := world.registered("e")).version) or info.state is NodeState.READY, "READY"
        )
        assert seen <= {V0, V1} and has_state(world, NodeState.READY, V1)()
        assert (engine.version, engine.loaded) == ("1.0", str(path))
        assert engine.calls.count("/update_weights_from_disk") == 1


@pytest.mark.fault(17)
async def test_an_engine_of_a_replaced_epoch_is_not_ready_before_it_holds_the_target(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", PolicyVersion(2, 0))
    world.sync.set(world.keys.evaluation, "x")
    async with FakeServer(version="1.7") as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.SYNCING), "SYNCING without a version")
        await asyncio.sleep(0.2)
        assert has_state(world, NodeState.SYNCING)()
        world.sync.delete(world.keys.evaluation)
        await eventually(has_state(world, NodeState.READY, PolicyVersion(2, 0)), "READY at the target")


@pytest.mark.fault(43)
async def test_corrupt_weights_leave_the_engine_as_it_was_and_then_quarantine_it(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
        world.publish_weights(tmp_path / "weights", V1, spoil=True)
        await eventually(lambda: "sha256" in world.registered("e").detail, "it says why")
        assert has_state(world, NodeState.READY)(), "the first failure may be a copy that is under way"
        await eventually(has_state(world, NodeState.QUARANTINED), "QUARANTINED after the second")
        assert "/pause_generation" not in engine.calls, "the engine never saw the corrupt files"
        world.publish_weights(tmp_path / "weights", V2)
        await eventually(has_state(world, NodeState.READY, V2), "a valid version fixes it")


@pytest.mark.fault(42)
async def test_the_learner_sees_which_version_is_being_read_and_does_not_remove_it(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path, update_timeout_s=0.5):
        await eventually(has_state(world, NodeState.READY), "READY")
        engine.faults["/update_weights_from_disk"] = Fault(hang=True, times=1)
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(lambda: "/update_weights_from_disk" in engine.calls, "it is being read")
        await eventually(lambda: V1 in in_use([world.registered("e")]), "and the learner sees it")
        assert V0 in in_use([world.registered("e")])


@pytest.mark.fault(42)
@pytest.mark.parametrize("wrong", ["missing", "no manifest", "other version", "escapes"])
async def test_a_directory_that_is_not_the_version_is_never_loaded(wrong: str, world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path, verify_attempts=1):
        await eventually(has_state(world, NodeState.READY), "READY")
        world.sync.set(world.keys.evaluation, "x")  # hold the node back until the directory is broken
        path = world.publish_weights(tmp_path / "weights", V1)
        manifest = path / "manifest.json"
        if wrong == "missing":
            path.rename(tmp_path / "elsewhere")
        elif wrong == "no manifest":
            manifest.unlink()
        elif wrong == "other version":
            manifest.write_text(manifest.read_text().replace('"1.0"', '"1.9"'))
        else:
            manifest.write_text(manifest.read_text().replace("model.safetensors", "../v1.0/model.safetensors"))
        await asyncio.sleep(0.1)
        world.target(PolicyVersion(1, 0), str(path), digest="changed" if wrong == "missing" else _digest(world))
        world.sync.delete(world.keys.evaluation)
        await eventually(has_state(world, NodeState.QUARANTINED), "QUARANTINED")
        assert "/update_weights_from_disk" not in engine.calls


def _digest(world) -> str:
    from protocol.codec import decode

    return decode(world.sync.hget(world.keys.target, "b")).digest


async def test_an_evaluation_on_engines_of_its_own_holds_up_only_those(world, tmp_path: Path) -> None:
    world.sync.set(world.keys.evaluation, "eval-engines:another-run")
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(has_state(world, NodeState.READY, V1), "it trains, and loads")
    world.sync.delete(world.keys.evaluation)
    async with FakeServer() as engine, node(world, engine, tmp_path, role="eval"):
        await eventually(has_state(world, NodeState.READY, V1), "READY")
        world.sync.set(world.keys.evaluation, "eval-engines:another-run")
        world.publish_weights(tmp_path / "weights", V2)
        await asyncio.sleep(0.3)
        assert has_state(world, NodeState.READY, V1)(), "it serves the evaluation, and waits"
        world.sync.delete(world.keys.evaluation)
        await eventually(has_state(world, NodeState.READY, V2), "then it loads")


async def test_the_version_under_validation_is_loaded_after_a_later_one_was_announced(world, tmp_path: Path) -> None:
    world.sync.set(world.keys.evaluation, str(VersionPin("r", eval_engines=True, version=V1)))
    world.publish_weights(tmp_path / "weights", V1)
    world.sync.set(world.keys.validated, world.sync.hget(world.keys.target, "b"))
    world.publish_weights(tmp_path / "weights", V2)
    async with FakeServer() as engine, node(world, engine, tmp_path, role="eval"):
        await eventually(has_state(world, NodeState.READY, V1), "it loads what is validated")
        await asyncio.sleep(0.3)
        assert has_state(world, NodeState.READY, V1)() and engine.calls.count("/update_weights_from_disk") == 1
        world.sync.delete(world.keys.evaluation)
        await eventually(has_state(world, NodeState.READY, V2), "then the target")
    async with FakeServer(version="1.0") as engine, node(world, engine, tmp_path):
        world.sync.set(world.keys.evaluation, str(VersionPin("r", eval_engines=True, version=V1)))
        await eventually(has_state(world, NodeState.READY, V2), "an engine of training loads the target")
    world.sync.delete(world.keys.evaluation)


async def test_a_swap_waits_for_an_evaluation_to_end(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
        world.sync.set(world.keys.evaluation, "somebody")
        world.publish_weights(tmp_path / "weights", V1)
        await asyncio.sleep(0.3)
        assert has_state(world, NodeState.READY)() and "/pause_generation" not in engine.calls
        world.publish_weights(tmp_path / "weights", V2)  # the target moves on meanwhile
        await asyncio.sleep(0.1)
        world.sync.delete(world.keys.evaluation)
        await eventually(has_state(world, NodeState.READY, V2), "the newest is loaded")
        assert engine.calls.count("/update_weights_from_disk") == 1, "and only that"


@pytest.mark.fault(11, 13)
async def test_a_lower_epoch_is_refused(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path):
        world.publish_weights(tmp_path / "weights", PolicyVersion(3, 5))
        await eventually(has_state(world, NodeState.READY, PolicyVersion(3, 5)), "READY at epoch 3")
        world.publish_weights(tmp_path / "weights", PolicyVersion(2, 90))
        await asyncio.sleep(0.2)
        assert has_state(world, NodeState.READY, PolicyVersion(3, 5))() and engine.version == "3.5"


async def test_a_pause_that_fails_changes_nothing_and_is_tried_again(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
        engine.faults["/pause_generation"] = Fault(status=500, times=1)
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(lambda: "could not load" in world.registered("e").detail, "it says why")
        assert has_state(world, NodeState.READY)()
        await eventually(has_state(world, NodeState.READY, V1), "the next try works")


@pytest.mark.fault(15)
@pytest.mark.parametrize("route", ["/update_weights_from_disk", "/model_info", "/continue_generation"])
async def test_an_update_that_fails_half_way_quarantines_the_engine_until_all_is_loaded(
    route: str, world, tmp_path: Path
) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
        seen: list[NodeState] = []
        engine.faults[route] = Fault(status=500, times=1)
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(
            lambda: seen.append(world.registered("e").state) or NodeState.QUARANTINED in seen, "QUARANTINED"
        )
        await eventually(has_state(world, NodeState.READY, V1), "READY after it was loaded as a whole")
        assert engine.calls.count("/update_weights_from_disk") == 2 and not engine.paused


async def test_a_version_that_a_cpu_engine_refuses_completely_changes_nothing(world, tmp_path: Path) -> None:
    async with FakeServer() as engine:
        engine.faults["/server_info"] = Fault(body={"engine": "foray-cpu"})
        async with node(world, engine, tmp_path):
            await eventually(has_state(world, NodeState.READY), "READY")
            incarnation = world.registered("e").incarnation
            refusing = engine.faults["/update_weights_from_disk"] = Fault(status=400)
            world.publish_weights(tmp_path / "weights", V1)
            await eventually(lambda: "could not load 1.0: refused" in world.registered("e").detail, "it says why")
            assert has_state(world, NodeState.READY)() and not engine.paused
            refusing.times = 0
            await eventually(has_state(world, NodeState.READY, V1), "READY after another try")
            assert world.registered("e").incarnation == incarnation


async def test_a_cpu_engine_that_refuses_a_version_and_does_not_say_its_own_is_quarantined(
    world, tmp_path: Path
) -> None:
    async with FakeServer() as engine:
        engine.faults["/server_info"] = Fault(body={"engine": "foray-cpu"})
        async with node(world, engine, tmp_path):
            await eventually(has_state(world, NodeState.READY), "READY")
            engine.faults["/update_weights_from_disk"] = Fault(status=400, times=1)
            engine.faults["/model_info"] = Fault(status=500, times=1)
            seen: list[NodeState] = []
            world.publish_weights(tmp_path / "weights", V1)
            await eventually(
                lambda: seen.append(world.registered("e").state) or NodeState.QUARANTINED in seen, "QUARANTINED"
            )
            await eventually(has_state(world, NodeState.READY, V1), "READY after it was loaded as a whole")


async def test_an_engine_that_reports_a_wrong_version_is_quarantined(world, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
        engine.faults["/model_info"] = Fault(body={"weight_version": "1.4"}, times=1)
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(lambda: world.registered("e").state is NodeState.QUARANTINED, "QUARANTINED")
        await eventually(has_state(world, NodeState.READY, V1), "loaded again")


@pytest.mark.fault(17)
async def test_a_silent_engine_is_suspect_and_comes_back(world, tmp_path: Path) -> None:
    world.publish_weights(tmp_path / "weights", V1)
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY, V1), "READY")
        await engine.stop()
        await eventually(lambda: world.registered("e").state in (NodeState.SUSPECT, NodeState.SYNCING), "not routable")
        engine.version = "default"  # its owner has restarted it, with its first weights
        await engine.start()
        await eventually(has_state(world, NodeState.READY, V1), "READY at the target again")
        assert engine.version == "1.0"


async def test_a_drain_waits_for_what_runs_and_swaps_nothing_more(world, tmp_path: Path) -> None:
    async with FakeServer(latency_s=1.6) as engine, aiohttp.ClientSession() as session:
        request = GenerateRequest(ids=[1, 2], session="s", group="g", max_new_tokens=4, sampling=Sampling())
        async with node(world, engine, tmp_path) as stop:
            await eventually(has_state(world, NodeState.READY), "READY")
            turn = asyncio.create_task(SglangClient(session, engine.url).generate(request, version="", timeout_s=10.0))
            await eventually(lambda: engine.requests, "a request runs")
            stop.requested.set()
            await eventually(has_state(world, NodeState.DRAINING), "DRAINING at once", 0.5)
            world.publish_weights(tmp_path / "weights", V1)
            await eventually(lambda: world.registered("e") is None, "deregistered in the end")
            assert turn.done() and len((await turn).ids) == 4
        assert "/pause_generation" not in engine.calls


async def test_an_engine_drains_when_an_operator_asks_and_stays_until_it_is_stopped(world, tmp_path: Path) -> None:
    world.sync.sadd(world.keys.drain, "e")  # from before its start
    async with FakeServer(latency_s=0.6) as engine, aiohttp.ClientSession() as session:
        request = GenerateRequest(ids=[1, 2], session="s", group="g", max_new_tokens=4, sampling=Sampling())
        async with node(world, engine, tmp_path) as stop:
            await eventually(has_state(world, NodeState.READY), "READY")
            await eventually(lambda: not world.sync.exists(world.keys.drain), "the older request is void")
            turn = asyncio.create_task(SglangClient(session, engine.url).generate(request, version="", timeout_s=10.0))
            await eventually(lambda: engine.requests, "a request runs")
            world.sync.sadd(world.keys.drain, "e", "another")
            await eventually(has_state(world, NodeState.DRAINING), "DRAINING", 5)
            assert world.sync.smembers(world.keys.drain) == {b"another"} and len((await turn).ids) == 4
            world.publish_weights(tmp_path / "weights", V1)
            await asyncio.sleep(0.5)
            assert has_state(world, NodeState.DRAINING)() and "/pause_generation" not in engine.calls
            stop.requested.set()
            await eventually(lambda: world.registered("e") is None, "deregistered", 2.5)


async def test_a_drain_request_that_cannot_be_read_costs_nothing(world, tmp_path: Path) -> None:
    world.sync.set(world.keys.drain, "not a set")
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
        await asyncio.sleep(0.5)  # several looks at the key
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(has_state(world, NodeState.READY, V1), "following")


async def test_a_redis_that_restarts_does_not_cost_the_registration(own_world, tmp_path: Path) -> None:
    world = own_world
    async with FakeServer() as engine, node(world, engine, tmp_path):
        await eventually(has_state(world, NodeState.READY), "READY")
        world.process.kill()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(world.process.start)
        world.sync.flushall()
        world.publish_weights(tmp_path / "weights", V1)
        await eventually(has_state(world, NodeState.READY, V1), "registered again, and following")


async def test_an_engine_that_cannot_start_is_a_user_error(world, tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", "words")
    run = RunSettings(id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=model)
    with pytest.raises(UserError, match="there is no model"):
        await asyncio.wait_for(serve(run, NodeSettings(id="e"), stop=ShutdownSignal()), 10)
    (model / "config.json").write_text("{}")
    broken = SglangEngine(python=sys.executable, launcher=_script(tmp_path, "import sys; sys.exit('no such GPU')"))
    with pytest.raises(UserError) as caught:
        await asyncio.wait_for(serve(run, NodeSettings(id="e", kind=broken), stop=ShutdownSignal()), 20)
    assert "exited with code 1 during startup" in caught.value.what and "no such GPU" in caught.value.why
    assert world.registered("e") is None


async def test_weights_removed_during_the_launch_are_named_while_they_are_read_and_the_newest_are_tried_next(
    world, tmp_path: Path
) -> None:
    # The learner publishes several versions in the time that an engine takes to start, and removes old ones.
    text = """
import pathlib, shutil, sys, time
model = pathlib.Path(sys.argv[sys.argv.index("--model-path") + 1])
(pathlib.Path(__file__).parent / f"launched-{model.name}").touch()
time.sleep(1.0)
shutil.rmtree(model)
sys.exit(2)
"""
    model = write_tokenizer(tmp_path / "model", "words")
    run = RunSettings(id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=model)
    kind = SglangEngine(python=sys.executable, launcher=_script(tmp_path, text))
    world.publish_weights(tmp_path / "weights", V1)
    stop = ShutdownSignal()
    node = asyncio.create_task(serve(run, NodeSettings(id="e", kind=kind, heartbeat_s=0.1, drain_s=0.1), stop=stop))
    try:
        await eventually((tmp_path / f"launched-v{V1.label}").exists, "launched with the first version", 20)
        assert has_state(world, NodeState.SYNCING, V1)(), "the learner must see which version is being read"
        world.publish_weights(tmp_path / "weights", V2)
        await eventually((tmp_path / f"launched-v{V2.label}").exists, "launched with the newest version", 20)
    finally:
        stop.requested.set()
        await asyncio.wait_for(node, 20)


def _script(directory: Path, text: str) -> Path:
    path = directory / "launch.py"
    path.write_text(text)
    return path


def _spawn(argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stderr=subprocess.PIPE, cwd=cwd, env=env)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of a few thousand parameters with the words tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = write_tokenizer(tmp_path_factory.mktemp("policy"), "words")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=64, num_key_value_heads=1, max_position_embeddings=256, eos_token_id=1, **shape)
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.fault(17, 18)
async def test_the_cpu_engine_joins_late_is_killed_and_ends_with_its_node(world, tmp_path: Path, policy: Path) -> None:
    files = {file.name: file.read_bytes() for file in policy.iterdir()}
    world.publish_weights(tmp_path / "weights", V1, files=files)
    config = tmp_path / "foray.yaml"
    config.write_text(
        f"run: {{id: {world.keys.run}, dir: {tmp_path / 'run'}, redis_url: '{world.url}', model: {policy}}}\n"
        "engine: {id: e, poll_s: 0.05, heartbeat_s: 0.2, kind: {type: cpu, max_running: 4, max_total_tokens: 2048}}\n"
    )
    argv = [sys.executable, "-m", "rollout_server.node", "--config", str(config), "engine.drain_s=2"]
    process = _spawn(argv, tmp_path)
    engines: list[int] = []
    try:
        await eventually(has_state(world, NodeState.READY, V1), "READY with the target's weights", 60)
        assert world.registered("e").updates == 0, "it was launched with them"
        world.publish_weights(tmp_path / "weights", V2, files=files)
        await eventually(has_state(world, NodeState.READY, V2), "an update works", 20)
        async with aiohttp.ClientSession() as session:
            client = SglangClient(session, world.registered("e").url)
            request = GenerateRequest(ids=[3, 4, 5], session="s", group="g", max_new_tokens=5, sampling=Sampling())
            completion = await client.generate(request, version="1.1", timeout_s=20.0, vocab_size=64)
        assert len(completion.ids) == 5 or completion.matched == 1, "five tokens, or fewer before the end token"
        assert {span.version for span in completion.spans} == {V2}
        engines = descendants(process.pid)[1:]  # the first is their guard
        born = world.registered("e").incarnation
        os.kill(engines[0], signal.SIGKILL)
        await eventually(lambda: world.registered("e").state is not NodeState.READY, "its death is noticed", 5)
        await eventually(has_state(world, NodeState.READY, V2), "restarted at the target", 60)
        assert world.registered("e").incarnation != born
        ((_, event),) = world.sync.xrange(world.keys.events)
        assert event[b"text"].startswith(b"the engine was killed by SIGKILL (out of memory?); its node launches it")
        engines = descendants(process.pid)
        assert len(engines) == 2, "the guard and the engine"
        process.kill()
        await eventually(lambda: not any(map(_alive, engines)), "the engine dies with its node, and its guard too", 5)
    finally:
        process.kill()
        errors = process.communicate()[1].decode()
        for pid in engines:
            if _alive(pid):
                os.kill(pid, signal.SIGKILL)
    assert "Traceback" not in errors, errors


@pytest.mark.slow
async def test_sigterm_ends_a_node_with_status_0(world, tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", "words")
    async with FakeServer() as engine:
        argv = [sys.executable, "-m", "rollout_server.node", f"run.id={world.keys.run}", f"run.model={model}"]
        argv += ["engine.id=e", "engine.kind.type=attach", f"engine.kind.url={engine.url}", f"run.dir={tmp_path}"]
        env = os.environ | {"FORAY_REDIS_URL": world.url}
        process = _spawn(argv, tmp_path, env)
        try:
            await eventually(has_state(world, NodeState.READY), "READY", 30)
            process.terminate()
            await eventually(lambda: process.poll() is not None, "it ends", 15)
        finally:
            process.kill()
            errors = process.communicate()[1].decode()
    assert process.returncode == 0, errors
    assert world.registered("e") is None
