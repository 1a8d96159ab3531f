"""The real components between a learner and an engine: Redis, a publisher, a node, the router with its client.

And the arithmetic of the engine redone by transformers, from nothing but ids and the versions that were recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import torch
from contract_engines import PATIENCE_S, Server, picked
from contract_models import read_weights

from learner.config.learner import DiskPublishSettings, DistributedPublishSettings
from learner.delivery.store import RunStore
from learner.weights import build_publisher
from learner.weights.base import WeightPublisher
from protocol.keys import Keys
from protocol.messages import NodeState, VersionSpan
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis.aio import RedisClient
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import Completion
from rollout_server.engine.client import SglangClient
from rollout_server.engine.router import Router, TurnLimits
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.server import serve

Transport = Literal["disk", "distributed"]
Mode = Literal["retract", "in_place"]
RUNS = itertools.count(1)


@dataclass
class Ring:
    """A learner's half (`publish`) and a rollout server's half (`router`) around one engine."""

    publisher: WeightPublisher
    router: Router
    fleet: Fleet

    async def publish(self, version: PolicyVersion, model: Path) -> None:
        """What the learner does after a step: publish and announce. Does not wait for the engine to hold it."""

        def in_the_training_thread() -> None:
            update = self.publisher.publish(version, read_weights(model).items())
            self.publisher.announce(update, "ready")

        await asyncio.to_thread(in_the_training_thread)

    async def until_held(self, version: PolicyVersion) -> None:
        """Until the router sees an engine that is ready at `version`."""
        async with asyncio.timeout(PATIENCE_S):
            while not any(
                e.state is NodeState.READY and e.version == version for e in self.fleet.table.engines.values()
            ):
                await self.fleet.changed(0.2)


@contextlib.asynccontextmanager
async def ring(server: Server, redis_url: str, folder: Path, transport: Transport, mode: Mode) -> AsyncIterator[Ring]:
    """A ring around `server`, whose engine holds the weights of `server.first` as version 1.0 when this is entered."""
    run = RunSettings(id=f"ring-{next(RUNS)}", dir=folder, redis_url=redis_url, model=server.first)
    store = RunStore(redis_url, run.id)
    store.prepare()
    epoch = store.acquire("learner", 0, 600_000, takeover=False)
    assert epoch == 1
    store.set_owner(1, "learner")
    files = [p for p in server.first.iterdir() if p.suffix == ".json"]
    kinds = {"disk": DiskPublishSettings(fsync=False), "distributed": DistributedPublishSettings(fsync=False)}
    publisher = build_publisher(kinds[transport], run, files, store)
    redis, stop, waits = RedisClient(redis_url, Keys(run.id)), ShutdownSignal(), WaitTimer()
    node = NodeSettings(id="e", kind=AttachedEngine(url=server.url), pause_mode=mode, poll_s=0.02, heartbeat_s=0.2)
    fleet = Fleet(redis, waits, poll_s=0.05)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as tasks:
        router = Router(
            fleet,
            lambda info: SglangClient(session, info.url, name=info.id),
            waits,
            max_lag=100,
            limits=TurnLimits(timeout_s=PATIENCE_S, stall_s=PATIENCE_S, wait_s=PATIENCE_S),
            adaptive=False,
        )
        whole = Ring(publisher, router, fleet)
        following, serving = tasks.create_task(fleet.follow()), None
        try:
            # whatever the last test has left there
            await EngineAdmin(session, server.url).update_weights_from_disk(
                str(server.first), label="1.0", flush=True, timeout_s=PATIENCE_S
            )
            await whole.publish(PolicyVersion(1, 0), server.first)
            serving = tasks.create_task(serve(run, node, stop=stop))
            await whole.until_held(PolicyVersion(1, 0))
            yield whole
        finally:
            stop.requested.set()
            if serving is not None:
                await serving
            following.cancel()
            await asyncio.to_thread(publisher.close)
            await redis.aclose()
            store.close()


def after_retract(models: dict[PolicyVersion, Any], prompt: Sequence[int], done: Completion) -> torch.Tensor:
    """[n] log-probs if every token was sampled by its version from a cache of that version alone."""
    ids = [*prompt, *done.ids]
    parts = []
    for span in done.spans:
        with torch.inference_mode():
            logits = models[span.version](torch.tensor([ids])).logits[0]
        start, end = len(prompt) + span.start, len(prompt) + span.end
        parts.append(picked(logits[start - 1 : end - 1], ids[start:end]))
    return torch.cat(parts)


def in_place(models: dict[PolicyVersion, Any], prompt: Sequence[int], done: Completion) -> torch.Tensor:
    """[n] log-probs if keys and values were never made again: each is of the version in force when it was made.

    The forward pass that samples token i reads token i - 1 and makes its key and value, so a version that samples
    tokens [a, b) makes those of the tokens [a - 1, b - 1).
    """
    ids = [*prompt, *done.ids]
    cache, position, rows = None, 0, []
    for span in done.spans:
        end = len(prompt) + span.end - 1
        with torch.inference_mode():
            out = models[span.version](torch.tensor([ids[position:end]]), past_key_values=cache, use_cache=True)
        cache, position = out.past_key_values, end
        rows.append(out.logits[0])
    return picked(torch.cat(rows)[len(prompt) - 1 :], done.ids)


def moved(spans: Sequence[VersionSpan], by: int) -> tuple[VersionSpan, ...]:
    """The spans with every border between two of them `by` tokens further right: what a wrong label would look like."""
    borders = [0, *(span.start + by for span in spans[1:]), spans[-1].end]
    pairs = zip(spans, borders, borders[1:], strict=False)
    return tuple(span.model_copy(update={"start": a, "end": b}) for span, a, b in pairs)
