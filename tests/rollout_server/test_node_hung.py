"""A real CPU engine that hangs is found by its progress, killed and replaced; a relaunch loop ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from protocol.errors import UserError
from protocol.messages import EngineInfo, NodeState
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from rollout_server.node import agent, guard, watchdog
from rollout_server.node.config import CpuEngine, NodeSettings
from rollout_server.node.server import serve
from rollout_server.node.status import EngineStatus
from tests.rollout_server.test_node_watch import counts, engine_tree, info
from tests.support.engine_http import post, serving, write_policy
from tests.support.waiting import eventually

HERE = Path(__file__).parents[1] / "support" / "slow_engine"
FLOOR_S = 2.0


@pytest.mark.slow
@pytest.mark.fault(19)
@pytest.mark.parametrize("how", ["stopped", "blocked", "spinning"])
async def test_a_hung_engine_is_found_and_replaced_within_three_times_the_limit(
    how: str, world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hang, limits = tmp_path / "hang", [0.0]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HANG_FILE", str(hang))
    monkeypatch.setattr(agent, "FIRST_BACKOFF_S", 0.1)
    lost = watchdog.EngineHung.__init__

    def noted(self: watchdog.EngineHung, *given: object) -> None:
        limits.append(float(str(given[0]).partition("(limit ")[2].partition(" s)")[0]))
        lost(self, *given)

    monkeypatch.setattr(watchdog.EngineHung, "__init__", noted)
    (tmp_path / "model").mkdir()
    model = write_policy(tmp_path / "model")
    run = RunSettings(id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=model)
    quick = {"poll_s": 0.1, "heartbeat_s": 0.2, "probe_s": 0.2, "probe_timeout_s": 1.0, "drain_s": 0.1}
    settings = NodeSettings.model_validate({"id": "e", "kind": CpuEngine(), "hang_s": FLOOR_S, **quick})
    stop = ShutdownSignal()
    task = asyncio.create_task(serve(run, settings, stop=stop))
    try:
        await eventually(lambda: (e := world.registered("e")) is not None and e.state is NodeState.READY, "READY", 90)
        born = info(world).incarnation
        began = time.monotonic()
        if how == "stopped":
            for pid in engine_tree():
                os.kill(pid, signal.SIGSTOP)
        else:
            hang.write_text("spin" if how == "spinning" else "block")
        await eventually(lambda: info(world).state is NodeState.SUSPECT, "found", 90)
        took = time.monotonic() - began
        hang.unlink(missing_ok=True)
        await eventually(
            lambda: info(world).state is NodeState.READY and info(world).incarnation != born, "replaced", 90
        )
        await eventually(lambda: counts(world).get("hangs") == 1.0, "counted")
        with capsys.disabled():
            print(f"\n{how}: limit {limits[-1]:.0f} s, found after {took:.1f} s, replaced")
        assert limits[-1] >= FLOOR_S and took <= 3 * limits[-1]
    finally:
        stop.requested.set()
        await asyncio.wait_for(task, 20)


@pytest.mark.slow
@pytest.mark.fault(19)
async def test_a_relaunch_loop_ends_with_its_cause(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.rollout_server.test_node_watch import launched
    from tests.support.environments import write_tokenizer

    monkeypatch.setattr(agent, "FIRST_BACKOFF_S", 0.05)
    kind = launched(tmp_path)
    script = tmp_path / "launch.py"
    dies = "async def metrics(request):\n    print('out of memory: cannot allocate', flush=True)\n    os._exit(9)\n"
    script.write_text(script.read_text().replace("async def metrics(request):\n", dies))  # it is asked when READY
    run = RunSettings(
        id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=write_tokenizer(tmp_path / "model", "words")
    )
    (run.model / "config.json").write_text("{}")
    settings = NodeSettings(id="e", kind=kind, relaunches=2, poll_s=0.05, heartbeat_s=0.1)
    with pytest.raises(UserError) as caught:
        await asyncio.wait_for(serve(run, settings, stop=ShutdownSignal()), 60)
    text = caught.value.render()
    assert text.startswith("error: engine e was lost 3 times within an hour, the last time: ")
    assert "x the engine exited with code 9" in text and "out of memory: cannot allocate" in text
    assert "e.engine.log" in text and "engine.relaunches" in text
    assert (tmp_path / "launched").read_text().count("\n") == 3


def test_a_start_has_failed_when_its_processes_have_stopped_to_grow() -> None:
    """However long it takes: the memory grows every 200 s for an hour, and then not any more."""
    now, size = [0.0], [10]
    growth = guard.Growth(300.0, lambda: now[0])
    while now[0] < 3600:
        now[0] += 1.0
        size[0] += now[0] % 200 == 0
        assert not growth.has_ended(lambda: size[0])
    while not growth.has_ended(lambda: size[0]):
        now[0] += 1.0
    assert 3600 + 300 <= now[0] <= 3600 + 320


def test_the_memory_of_a_tree_is_that_of_all_its_processes() -> None:
    assert guard.memory_mib(os.getpid()) > 10


def test_calls_of_a_node_wait_as_long_as_its_engine_is_slow() -> None:
    status = EngineStatus(EngineInfo(id="e", url="http://e", state=NodeState.READY))
    assert (status.limit_s(30.0), status.update_limit_s(300.0)) == (30.0, 300.0)
    status.silence_s, status.start_s, status.load_s = 20.0, 400.0, 90.0  # SGLang
    assert (status.limit_s(30.0), status.update_limit_s(300.0)) == (100.0, 2000.0)
    status.loads = {"pace_s": 8.0}  # the CPU engine, which measures its steps
    assert (status.limit_s(30.0), status.info().pace_s) == (40.0, 8.0)


async def test_the_cpu_engine_reports_its_layers_and_its_slowest_step(tmp_path: Path) -> None:
    async with serving(write_policy(tmp_path)) as client:
        before = (await (await client.get("/v1/loads")).json())["loads"][0]
        await post(client, "/generate", input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
        after = (await (await client.get("/v1/loads")).json())["loads"][0]
    assert after["num_computed_layers"] == before["num_computed_layers"] + 3 * 3, "two layers and the head, each step"
    assert 0 < after["slowest_step_s"] < 60
