"""A CPU engine that another run has left is attached: what it generates is this run's, or it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save

from protocol.codec import decode_as, encode
from protocol.messages import NodeState, WeightUpdate
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.engine.admin import EngineAdmin
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.server import serve
from tests.rollout_server.test_cpu_engine_lora import write_adapter
from tests.support.engine_http import Client, post, serving, write_policy
from tests.support.waiting import eventually

V = PolicyVersion(1, 2)
PROMPT = {"input_ids": [5, 6, 7, 8], "return_logprob": True, "sampling_params": {"max_new_tokens": 8, "top_k": 1}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@asynccontextmanager
async def node(world: Any, tmp_path: Path, model: Path, client: Client) -> AsyncIterator[None]:
    run = RunSettings(id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=model)
    kind = AttachedEngine(url=str(client.make_url("/")))
    stop = ShutdownSignal()
    settings = NodeSettings(id="e", kind=kind, poll_s=0.02, heartbeat_s=0.1, drain_s=0.0)
    serving_node = asyncio.create_task(serve(run, settings, stop=stop))
    try:
        yield
    finally:
        stop.requested.set()
        await asyncio.wait_for(serving_node, 20)


async def is_ready(world: Any) -> None:
    await eventually(
        lambda: (i := world.registered("e")) and (i.state, i.version) == (NodeState.READY, V), "READY at 1.2", 20
    )


def scaled(model: Path, by: float) -> bytes:
    tensors = load_file(model / "model.safetensors")
    return save({name: tensor * by + 0.01 for name, tensor in tensors.items()}, metadata={"format": "pt"})


@pytest.mark.parametrize("left", ["1.2", "1.50"])
async def test_the_weights_of_another_run_are_replaced_whatever_their_label(
    left: str, world: Any, policy: Path, tmp_path: Path
) -> None:
    async with serving(policy, weight_version=left) as client, aiohttp.ClientSession() as session:
        admin = EngineAdmin(session, str(client.make_url("/")))
        before = (await admin.checksums(timeout_s=10)).tensors
        async with node(world, tmp_path, policy, client):
            path = world.publish_weights(tmp_path / "v", V, files={"model.safetensors": scaled(policy, 1.5)})
            await is_ready(world)
            tensors = (await admin.checksums(timeout_s=10)).tensors
        differing = sum(tensors[name] != before[name] for name in tensors)
        print(f"left at {left}: {differing} of {len(tensors)} tensors replaced before it was READY at {V.label}")
        assert differing == len(tensors)
        async with serving(policy) as fresh:
            await post(fresh, "/update_weights_from_disk", model_path=str(path))
            expected = await post(fresh, "/generate", **PROMPT)
        assert (await post(client, "/generate", **PROMPT))["output_ids"] == expected["output_ids"]


async def test_the_adapters_of_another_run_are_replaced_and_its_weights_refused(
    world: Any, policy: Path, tmp_path: Path
) -> None:
    files = {}
    for seed, name in enumerate(("theirs", "ours")):
        path = write_adapter(tmp_path / name, policy, seed)
        files[name] = {file.name: file.read_bytes() for file in path.iterdir()}

    def publish(version: PolicyVersion) -> Path:
        published: Path = world.publish_weights(tmp_path / "v", version, files=files["ours"])
        update = decode_as(WeightUpdate, world.sync.hget(world.keys.target, "b"))
        world.sync.hset(world.keys.target, "b", encode(update.model_copy(update={"transport": "adapter"})))
        return published

    async with serving(policy, weight_version="default") as client:
        for name in (V.label, "1.1"):
            await post(client, "/load_lora_adapter", lora_name=name, lora_path=str(tmp_path / "theirs"))
        theirs = await post(client, "/generate", **PROMPT, lora_path=V.label)
        async with node(world, tmp_path, policy, client):
            path = publish(V)
            await is_ready(world)
            ours = await post(client, "/generate", **PROMPT, lora_path=V.label)
            cards = (await (await client.get("/v1/models")).json())["data"]
        assert [(card["id"], card["root"]) for card in cards[1:]] == [(V.label, str(path))]
        await post(client, "/load_lora_adapter", lora_name="reference", lora_path=str(tmp_path / "ours"))
        expected = await post(client, "/generate", **PROMPT, lora_path="reference")
        got, want, old = (
            torch.tensor([logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]])
            for answer in (ours, expected, theirs)
        )
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert old.shape != want.shape or float((old - want).abs().max()) > 1e-2
        print(f"adapters after it was READY: {len(cards) - 1}, of this run's file")
    async with serving(policy, weight_version="1.7") as client, node(world, tmp_path, policy, client):
        publish(PolicyVersion(1, 3))
        await eventually(
            lambda: (i := world.registered("e")) and "not those of the initial model" in i.detail, "it is refused", 20
        )
        assert world.registered("e").state is NodeState.SYNCING
