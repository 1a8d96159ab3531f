"""A fleet of unequal SGLangs, scripted: real nodes, a real publisher, and a group with NCCL's behaviour."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config.learner import DistributedPublishSettings
from learner.delivery.store import RunStore
from learner.weights import build_publisher
from learner.weights.base import WeightPublisher
from protocol.codec import decode_as
from protocol.messages import NodeState, WeightUpdate, WeightView
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.server import serve
from tests.rollout_server.test_node_distributed import BUCKET, DISK, JOIN, Member
from tests.support.environments import write_tokenizer
from tests.support.lazy_group import LazyGroup, lazy_groups
from tests.support.waiting import eventually

FLEET: dict[str, dict[str, Any]] = {
    "tp1": {"tp_size": 1},
    "tp2": {"tp_size": 2},
    "tp2b": {"tp_size": 2},
    "pp2": {"tp_size": 1, "pp_size": 2},
    "dp2": {"tp_size": 1, "dp_size": 2},
}
"""Name -> start arguments, as each reports them. Those of one layout hold the same checksum."""
FP8 = {"fp8": {"tp_size": 1, "quantization": "fp8"}}


async def step(publisher: WeightPublisher, version: PolicyVersion, shift: float) -> WeightUpdate:
    weights = {"model.embed.weight": torch.ones(64, 4) + shift, "model.norm.weight": torch.ones(4) + shift}
    update = await asyncio.to_thread(publisher.publish, version, list(weights.items()))
    await asyncio.to_thread(publisher.announce, update, "ready")
    return update


@pytest.mark.parametrize("proven", [True, False])
async def test_a_fleet_of_unequal_engines_gets_every_version(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proven: bool
) -> None:
    fleet = FLEET if proven else FLEET | FP8  # a quantised engine cannot take part in a proof
    in_group = ["tp1", "tp2", "tp2b"] if proven else ["fp8", "tp1", "tp2", "tp2b"]
    run = RunSettings(
        id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=write_tokenizer(tmp_path / "model", "words")
    )
    monkeypatch.setattr(LazyGroup, "alone", True)
    store = RunStore(world.url, run.id)
    store.prepare()
    epoch = store.acquire("L", 0, 60_000, takeover=True)
    assert isinstance(epoch, int)
    store.set_owner(epoch, "L")
    settings = DistributedPublishSettings(fsync=False, max_norm_jump=0.0, patience_s=0.0)
    stop = ShutdownSignal()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(lazy_groups(monkeypatch))
        engines: dict[str, Member] = {}
        for name, facts in fleet.items():
            engine = engines[name] = await stack.enter_async_context(Member())
            engine.facts = {"version": "0.5.21", "dtype": "bfloat16", **facts}
            engine.sums = {"per_engine_checksum": f"of {sorted(facts.items())}"}
        publisher = build_publisher(settings, run, [], store)
        stack.callback(store.close)
        stack.push_async_callback(asyncio.to_thread, publisher.close)
        given: dict[str, Any] = {"poll_s": 0.02, "heartbeat_s": 0.1, "drain_s": 0.0, "probe_s": 60.0}
        nodes = [
            asyncio.create_task(serve(run, NodeSettings(id=name, kind=AttachedEngine(url=e.url), **given), stop=stop))
            for name, e in engines.items()
        ]
        try:
            versions = [PolicyVersion(epoch, number) for number in range(3)]
            await step(publisher, versions[0], 0.0)
            await eventually(lambda: ready(world, fleet, versions[0]) == set(fleet), "all READY at the first version")
            for engine in engines.values():
                engine.calls.clear()
            for version in versions[1:]:
                update = await step(publisher, version, version.step / 8)
                assert update.transport == "distributed"
                view = decode_as(WeightView, world.sync.get(world.keys.view))
                assert [member.partition("/")[0] for member in view.members] == in_group
                ranks = ((1, 2, 4), 6) if proven else ((1, 2, 3, 5), 7)
                assert (view.rank_offsets, view.world_size) == ranks
                await eventually(
                    lambda v=version: ready(world, fleet, v) == set(fleet), f"all READY at {version.label}"
                )
            assert publisher.facts()["publish_fallbacks"] == 0
            for name, engine in engines.items():
                swaps = engine.calls.count(DISK), engine.calls.count(JOIN), engine.calls.count(BUCKET)
                assert swaps == ((0, 1, 2 + proven) if name in in_group else (2, 0, 0)), name
        finally:
            stop.requested.set()
            await asyncio.wait_for(asyncio.gather(*nodes), 20)


def ready(world: Any, fleet: Mapping[str, Any], version: PolicyVersion) -> set[str]:
    found = {name: world.registered(name) for name in fleet}
    return {n for n, info in found.items() if info and (info.state, info.version) == (NodeState.READY, version)}
