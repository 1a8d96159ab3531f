"""The first version of a run is the model that the engines were launched with: labelled, not loaded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import INITIAL, NEEDS_FILES, NodeState
from protocol.runtime.files import model_digest
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.node.config import AttachedEngine, CpuEngine, NodeSettings
from rollout_server.node.guard import descendants
from rollout_server.node.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of a few thousand parameters with the words tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = write_tokenizer(tmp_path_factory.mktemp("policy"), "words")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=64, num_key_value_heads=1, max_position_embeddings=256, eos_token_id=1, **shape)
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@contextlib.asynccontextmanager
async def node(world: Any, tmp_path: Path, model: Path, kind: Any) -> AsyncIterator[None]:
    run = RunSettings(id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=model)
    settings = NodeSettings(id="e", kind=kind, poll_s=0.02, heartbeat_s=0.1, drain_s=0.1)
    stop = ShutdownSignal()
    serving = asyncio.create_task(serve(run, settings, stop=stop))
    try:
        yield
    finally:
        stop.requested.set()
        await asyncio.wait_for(serving, 30)


def holds(world: Any, version: PolicyVersion, detail: str = "") -> Callable[[], bool]:
    def true() -> bool:
        info = world.registered("e")
        ready = info is not None and info.state is NodeState.READY
        return ready and info.version == version and info.detail.startswith(detail)

    return true


def guards(model: Path) -> list[int]:
    """The processes below this one that guard an engine of `model`: other tests have left theirs running."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())}
    return [pid for pid, line in lines.items() if b"guard.py" in line and bytes(model) in line]


def test_models_of_one_shape_have_different_digests(policy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    raw = bytearray((policy / "model.safetensors").read_bytes())
    (other / "model.safetensors").write_bytes(raw)
    assert model_digest(other) == model_digest(policy) and len(model_digest(policy)) == 64
    raw[-1] ^= 1
    (other / "model.safetensors").write_bytes(raw)
    assert model_digest(other) != model_digest(policy)
    assert model_digest(tmp_path) == ""


async def test_an_engine_that_the_node_did_not_launch_needs_files(world: Any, policy: Path, tmp_path: Path) -> None:
    async with FakeServer() as engine, node(world, tmp_path, policy, AttachedEngine(url=engine.url)):
        await eventually(holds(world, PolicyVersion(0, 0)), "READY")
        world.target(PolicyVersion(1, 0), str(policy), digest=INITIAL + model_digest(policy))
        await eventually(holds(world, PolicyVersion(0, 0), f"{NEEDS_FILES} 1.0"), "it says so")
        assert "/pause_generation" not in engine.calls
        world.publish_weights(tmp_path / "weights", PolicyVersion(1, 0))
        await eventually(holds(world, PolicyVersion(1, 0)), "READY with the files", 20)


@pytest.mark.slow
async def test_an_engine_is_labelled_loaded_or_launched_with_the_initial_model(
    world: Any, policy: Path, tmp_path: Path
) -> None:
    digest = INITIAL + model_digest(policy)
    files = {file.name: file.read_bytes() for file in policy.iterdir()}
    kind = CpuEngine(max_running=4, max_total_tokens=2048)
    async with node(world, tmp_path, policy, kind):
        await eventually(holds(world, PolicyVersion(0, 0)), "READY", 90)
        born = world.registered("e").incarnation
        world.target(PolicyVersion(1, 0), "/not/here", digest=digest)
        await eventually(holds(world, PolicyVersion(1, 0)), "labelled", 20)
        info = world.registered("e")
        assert (info.incarnation, info.updates) == (born, 0), "nothing was loaded"

        world.target(PolicyVersion(2, 0), str(policy), digest=INITIAL + "0" * 64)
        await eventually(lambda: world.registered("e").detail == f"{NEEDS_FILES} 2.0", "another model", 20)
        assert world.registered("e").updates == 0
        world.publish_weights(tmp_path / "weights", PolicyVersion(2, 0), files=files)
        await eventually(holds(world, PolicyVersion(2, 0)), "loaded from files", 20)

        world.target(PolicyVersion(3, 0), "/not/here", digest=digest)
        await eventually(holds(world, PolicyVersion(3, 0)), "it held another version: loaded from its run.model", 20)
        assert (world.registered("e").incarnation, world.registered("e").updates) == (born, 2)

        (guard,) = guards(policy)
        os.kill(descendants(guard)[-1], signal.SIGKILL)
        await eventually(lambda: world.registered("e").incarnation != born, "it was killed", 20)
        await eventually(holds(world, PolicyVersion(3, 0)), "launched with it, under its label", 90)
        assert world.registered("e").updates == 2
