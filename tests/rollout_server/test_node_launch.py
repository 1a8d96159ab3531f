"""Launching an engine from a node, and that no process of it outlives the node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from protocol.errors import UserError
from protocol.runtime.http.auth import Access, engine_key
from protocol.runtime.net import local_address
from protocol.runtime.torch_safety import NCCL_DEFAULTS, set_nccl_defaults, torch_versions
from rollout_server.cpu_engine.config import parse
from rollout_server.engine.admin import EngineAdmin
from rollout_server.node import guard
from rollout_server.node.capabilities import NO_OVERLAP, read_capabilities
from rollout_server.node.config import AttachedEngine, CpuEngine, NodeSettings, SglangEngine
from rollout_server.node.guard import descendants
from rollout_server.node.process import (
    EngineKeys,
    EngineProcess,
    check_host,
    command,
    environment,
    installed_versions,
    new_keys,
    tail,
)
from rollout_server.node.server import addresses

GIVEN = {"model": Path("/m"), "label": "1.2", "host": "127.0.0.1", "port": 31000}

FORKING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)  # a daemon in a separate session, which ignores SIGTERM
    os._exit(0)
print("forked", flush=True)
time.sleep(float(sys.argv[1]))
"""
"""An engine as engines are: a tree, with a member that no signal to the first one or to its group reaches."""


@pytest.mark.parametrize(
    ("settings", "local", "public"),
    [
        ({"host": "10.0.0.7"}, "10.0.0.7:31000", "10.0.0.7:31000"),
        ({"host": "0.0.0.0", "advertise": "gpu-7"}, "127.0.0.1:31000", "gpu-7:31000"),
        ({"host": "10.0.0.7", "advertise": "gate.example:8000"}, "10.0.0.7:31000", "gate.example:8000"),
        ({"host": "::", "advertise": "fd00::7"}, "[::1]:31000", "[fd00::7]:31000"),
        ({"host": "::1", "advertise": "[fd00::7]:8000"}, "[::1]:31000", "[fd00::7]:8000"),
        # only this machine can reach a Redis on loopback, and so only it can be a rollout server
        ({"host": "0.0.0.0"}, "127.0.0.1:31000", "127.0.0.1:31000"),
    ],
)
def test_an_engine_may_be_reached_at_another_address(settings: dict[str, str], local: str, public: str) -> None:
    node = NodeSettings(port=31000, **settings)
    assert addresses(node, "redis://127.0.0.1:6379/0") == (31000, f"http://{local}", f"http://{public}")


def test_an_engine_on_every_interface_has_the_address_of_the_route_to_redis() -> None:
    try:
        outside = local_address("192.0.2.1")  # TEST-NET-1 of RFC 5737: nothing is sent
    except OSError:
        pytest.skip("this machine has no route")
    node = NodeSettings(port=31000, host="0.0.0.0")
    assert addresses(node, "redis://192.0.2.1:6379/0") == (31000, "http://127.0.0.1:31000", f"http://{outside}:31000")
    with pytest.raises(UserError, match="cannot find the address of this host"):
        addresses(node, "redis://no.such.host.invalid:6379/0")


def test_the_cpu_engine_gets_the_names_of_its_keys() -> None:
    kind = CpuEngine(threads=2, max_running=8)
    keys = EngineKeys("", "secret")
    cpu = command(kind, **GIVEN, keys=keys)
    assert cpu[:3] == [sys.executable, "-m", "rollout_server.cpu_engine"]
    assert cpu[cpu.index("--weight-version") + 1] == "1.2" and cpu[cpu.index("--threads") + 1] == "2"
    assert parse(command(kind, **GIVEN, seed=4_000_000_000)[3:]).seed == 4_000_000_000
    assert cpu[-2:] == ["--admin-api-key-env", "FORAY_ENGINE_ADMIN_KEY"] and "secret" not in cpu
    assert parse(cpu[3:]).incremental_streaming_output
    assert environment(kind, keys)["FORAY_ENGINE_ADMIN_KEY"] == "secret"
    dated = command(kind, **GIVEN, keys=keys, day=date(2026, 1, 31))
    assert parse(dated[3:]).date == date(2026, 1, 31) and parse(cpu[3:]).date is None


def test_sglang_reads_its_keys_from_a_file_that_only_we_can_read(tmp_path: Path) -> None:
    kind = SglangEngine(python=sys.executable, args=("--tp-size", "2"))
    plain = command(kind, **GIVEN, home=tmp_path, seed=7)
    assert plain[plain.index("--random-seed") + 1] == "7"
    assert plain[:3] == [sys.executable, "-m", "sglang.launch_server"] and "--config" not in plain
    assert plain[plain.index("--tp-size") + 1] == "2" and "--incremental-streaming-output" in plain
    assert NO_OVERLAP not in plain and NO_OVERLAP in command(kind, **GIVEN, home=tmp_path, in_place=True)
    keys = EngineKeys("open: sesame", "s3cret")
    real = command(kind, **GIVEN, keys=keys, home=tmp_path)
    assert not any("sesame" in word or "s3cret" in word for word in real)
    path = Path(real[real.index("--config") + 1])
    assert yaml.safe_load(path.read_text()) == {"api-key": "open: sesame", "admin-api-key": "s3cret"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "mine.yaml").write_text("mem-fraction-static: 0.5\n")
    both = command(
        SglangEngine(python=sys.executable, args=("--config", str(tmp_path / "mine.yaml"), "--tp-size", "2")),
        **GIVEN,
        keys=keys,
        home=tmp_path,
    )
    assert both.count("--config") == 1 and "--tp-size" in both
    assert yaml.safe_load(path.read_text())["mem-fraction-static"] == 0.5
    with pytest.raises(UserError, match=r"cannot read nowhere\.yaml"):
        args = ("--config=nowhere.yaml",)
        command(SglangEngine(python=sys.executable, args=args), **GIVEN, keys=keys, home=tmp_path)


@pytest.mark.parametrize(
    ("facts", "args", "given"),
    [
        ({"dtype": "bfloat16"}, (), True),
        ({"torch_dtype": "float16"}, (), True),
        ({"text_config": {"dtype": "bfloat16"}}, (), True),
        ({"dtype": "float32"}, (), False),
        ({"dtype": "float32"}, ("--dtype=bfloat16",), True),
        ({"dtype": "bfloat16"}, ("--dtype", "float32"), False),
        ({"dtype": "bfloat16"}, ("--device", "cpu"), False),
        ([], (), False),
    ],
)
def test_logits_of_a_half_precision_model_are_float32(tmp_path: Path, facts: object, args: Any, given: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(facts))
    here = GIVEN | {"model": tmp_path}
    told = [
        command(SglangEngine(python=sys.executable, args=args, fp32_lm_head=on), **here).count("--enable-fp32-lm-head")
        for on in (True, False)
    ]
    assert told == [given, 0]
    twice = SglangEngine(python=sys.executable, args=(*args, "--enable-fp32-lm-head"))
    assert command(twice, **here).count("--enable-fp32-lm-head") == 1


def test_every_duration_of_a_node_may_be_less_than_a_second() -> None:
    names = [name for name, field in NodeSettings.model_fields.items() if field.annotation is float]
    assert len(names) > 8
    settings = NodeSettings.model_validate(dict.fromkeys(names, 0.5))
    assert {getattr(settings, name) for name in names} == {0.5}


@pytest.mark.parametrize("word", ["--dtype", "--device", "--config"])
def test_a_flag_without_its_value_is_a_mistake_of_the_settings(tmp_path: Path, word: str) -> None:
    kind = SglangEngine(python=sys.executable, args=("--tp-size", "2", word))
    with pytest.raises(UserError, match=r"engine\.kind\.args") as caught:
        command(kind, **GIVEN, keys=EngineKeys("a", "b"), home=tmp_path)
    assert word in caught.value.why


def test_every_incarnation_has_keys_of_its_own_and_rollout_servers_can_derive_one_of_them() -> None:
    access = Access({"node": "n" * 40})
    first, second = (new_keys(access, "e", born, {}) for born in ("a1", "b2"))
    assert len({first.api, first.admin, second.api, second.admin}) == 4
    assert first.api == engine_key(access, "e", "a1") and "n" * 40 not in repr(first) + first.api
    alone = new_keys(Access(), "e", "a1", {})
    assert alone.api == "" and len(alone.admin) >= 32, "without a node token generation stays open, control does not"
    given = new_keys(access, "e", "a1", {"FORAY_ENGINE_API_KEY": "mine", "FORAY_ENGINE_ADMIN_KEY": "too"})
    assert (given.api, given.admin) == ("mine", "too") and "mine" not in repr(given)


def test_no_key_looks_like_a_flag_to_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"\xf8" * count)  # "-Pj4..." in base 64
    admin = new_keys(Access(), "e", "a1", {}).admin
    assert admin[0].isalnum()
    kind = SglangEngine(python=sys.executable)
    command(kind, **GIVEN, keys=EngineKeys("a", admin), home=tmp_path)
    with pytest.raises(UserError, match="begins with"):
        command(kind, **GIVEN, keys=EngineKeys("-a", admin), home=tmp_path)


def test_an_engine_beyond_loopback_needs_a_key_for_generation() -> None:
    check_host("127.0.0.1", Access(), {})
    check_host("10.0.0.7", Access({"node": "n" * 40}), {})
    check_host("10.0.0.7", Access(), {"FORAY_ENGINE_API_KEY": "mine"})
    with pytest.raises(UserError, match=r"engine\.host = '10\.0\.0\.7'"):
        check_host("10.0.0.7", Access({"operator": "o" * 40}), {})


def test_an_engine_is_not_given_our_tokens_or_the_way_to_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORAY_NODE_TOKEN", "FORAY_OPERATOR_TOKEN_FILE", "FORAY_REDIS_URL", "FORAY_ENGINE_ADMIN_KEY"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("HF_TOKEN", "the engine's own business")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    env = environment(SglangEngine())
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in env, "the learner divides by the temperature"
    assert "canary" not in env.values() and env["HF_TOKEN"] and env["PATH"]


@pytest.mark.parametrize("exact", [True, False])
async def test_an_sglang_that_reports_wrong_versions_in_place_is_refused(exact: bool) -> None:
    class Described:
        async def server_info(self) -> dict[str, object]:
            return {"tp_size": 1, "disable_overlap_schedule": exact}

        async def loads(self) -> dict[str, float]:
            return {"max_tokens": 8.0, "max_running": 2.0}

    engine = cast(EngineAdmin, Described())
    assert (await read_capabilities(engine, pause_mode="retract"))["kind"] == "sglang"
    with contextlib.nullcontext() if exact else pytest.raises(UserError, match="pause_mode=in_place"):
        await read_capabilities(engine, pause_mode="in_place")


async def test_an_sglang_that_samples_every_request_alike_is_refused() -> None:
    class Described:
        async def server_info(self) -> dict[str, object]:
            return {"enable_deterministic_inference": True}

        async def loads(self) -> dict[str, float]:
            return {"max_tokens": 8.0, "max_running": 2.0}

    with pytest.raises(UserError, match="enable-deterministic-inference") as caught:
        await read_capabilities(cast(EngineAdmin, Described()), pause_mode="retract")
    assert "trajectories of a group would be equal" in caught.value.why


@pytest.mark.parametrize(
    ("info", "transports", "ranks", "proves"),
    [
        ({}, {"disk", "distributed"}, 1, True),
        ({"tp_size": 4, "enable_lora": True}, {"disk", "distributed", "adapter"}, 4, True),
        ({"tp_size": 2, "pp_size": 2, "enable_lora": True}, {"disk", "adapter"}, 2, True),
        ({"tp_size": 2, "dp_size": 2, "enable_lora": True}, {"disk"}, 2, True),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, {"disk", "distributed"}, 4, True),
        ({"tp_size": 4, "attn_dp_size": 2}, {"disk", "distributed"}, 4, True),
        ({"tp_size": 2, "quantization": "fp8"}, {"disk", "distributed"}, 2, False),
    ],
)
async def test_an_sglang_offers_the_transports_that_its_ranks_complete(
    info: dict[str, object], transports: set[str], ranks: int, proves: bool
) -> None:
    class Described:
        async def server_info(self) -> dict[str, object]:
            return {"version": "0.5.21", "dtype": "bfloat16", **info}

        async def loads(self) -> dict[str, float]:
            return {"max_tokens": 8.0, "max_running": 2.0}

    found = await read_capabilities(cast(EngineAdmin, Described()), pause_mode="retract")
    assert (set(found["transports"]), found["ranks"], found["proves"]) == (transports, ranks, proves)
    assert found["versions"] == {"engine": "sglang 0.5.21"} and found["checksums"] == ("sha256", "xxh3_128")
    sizes = [f"{name}{info.get(name + '_size', 1)}" for name in ("tp", "pp", "dp", "ep", "attn_dp")]
    assert found["layout"] == "/".join(["sglang", *sizes, "bfloat16", str(info.get("quantization", "none"))])


def test_the_versions_are_those_of_the_engines_interpreter(tmp_path: Path) -> None:
    ours = torch_versions()
    assert ours["torch"] == metadata.version("torch")
    assert installed_versions(CpuEngine()) == installed_versions(SglangEngine()) == ours
    assert installed_versions(SglangEngine(python=sys.executable)) == ours
    assert installed_versions(AttachedEngine(url="http://h:1")) == {}
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert installed_versions(SglangEngine(python=str(broken))) == {}, "unknown, not fatal"


def test_both_sides_of_an_nccl_group_have_one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    ours: dict[str, str] = {}
    set_nccl_defaults(ours)
    assert ours == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert ours.items() <= environment(SglangEngine()).items()
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert environment(SglangEngine())["NCCL_NVLS_ENABLE"] == "1", "the user's value stays"


def test_interpreter_and_launcher_are_found_from_here_and_in_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    found = command(SglangEngine(python="venv/bin/python", launcher=Path("requirements/sglang_cpu_launch.py")), **GIVEN)
    assert found[0] == str(tmp_path / "venv/bin/python"), "the link is kept: it names the environment"
    assert Path(found[1]).is_file() and Path(found[1]).is_absolute()
    with pytest.raises(UserError) as caught:
        command(SglangEngine(python="nowhere/bin/python"), **GIVEN)
    assert "nowhere/bin/python" in caught.value.what and "make gpu-env" in caught.value.todo
    with pytest.raises(UserError, match="no launcher"):
        command(SglangEngine(launcher=Path("nowhere.py")), **GIVEN)


def _guarded(*argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def _forking(tmp_path: Path, seconds: float) -> list[str]:
    (tmp_path / "fork.py").write_text(FORKING)
    return [sys.executable, str(tmp_path / "fork.py"), str(seconds)]


def _tree(pid: int, size: int) -> list[int]:
    deadline = time.monotonic() + 5
    while len(found := descendants(pid)) != size:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def _gone(pids: list[int], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_process_tree_of_a_node_ends_with_it(tmp_path: Path) -> None:
    with _guarded(*_forking(tmp_path, 1000)) as process:
        assert process.stdout is not None and process.stdout.readline()
        tree = _tree(process.pid, 2)
        assert process.stdin is not None
        process.stdin.close()  # what the kernel does for a node that is killed
        assert process.wait(10) == 128 + signal.SIGKILL and _gone(tree)


def test_a_suspended_guard_is_resumed_when_its_node_ends(tmp_path: Path) -> None:
    inner = [sys.executable, "-I", "-S", guard.__file__, *_forking(tmp_path, 1000)]
    text = f"import subprocess, time; p = subprocess.Popen({inner!r}, stdin=subprocess.PIPE); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", text]) as node:
        tree = _tree(node.pid, 3)
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        node.kill()
        assert _gone(tree)


def test_an_engine_that_exits_leaves_nothing_behind_and_its_status_is_known(tmp_path: Path) -> None:
    with _guarded(*_forking(tmp_path, 0.5)) as process:
        tree = _tree(process.pid, 2)
        assert process.wait(10) == 0 and _gone(tree)
    with _guarded(sys.executable, "-c", "import os; os.abort()") as process:
        assert process.wait(10) == 128 + signal.SIGABRT
    with _guarded("/no/such/program") as process:
        assert process.wait(10) == guard.CANNOT_START


async def test_a_stopped_tree_is_killed_at_once_with_its_stopped_guard(tmp_path: Path) -> None:
    argv = _forking(tmp_path, 1000)
    child = await EngineProcess.start(lambda home: argv, os.environ, tmp_path / "engine.log")
    tree = await asyncio.to_thread(_tree, child.pid, 2)
    for pid in [child.pid, *tree]:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    await child.stop(grace_s=0.0)
    assert _gone([child.pid, *tree]) and time.monotonic() - began < 3.0


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    argv = _forking(tmp_path, 1000)
    child = await EngineProcess.start(lambda home: argv, os.environ, tmp_path / "engine.log")
    tree = await asyncio.to_thread(_tree, child.pid, 2)
    while "forked" not in tail(child.log_path):  # noqa: ASYNC110 - it writes to a file
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await child.stop(grace_s=0.5)
    assert 0.5 <= time.monotonic() - began < 3.0 and _gone([child.pid, *tree])
    await child.stop()
