"""At maxmemory registrations, answers and metrics of rollout servers and nodes stay alive; metrics end no server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from protocol.codec import decode_as
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, ViewAnswer, WeightView
from protocol.runtime.redis import processes
from protocol.runtime.redis.errors import RedisFull
from protocol.runtime.redis.processes import LIFETIME_MS
from protocol.runtime.redis.server import function_library
from rollout_server import metrics
from rollout_server.instrumentation import InstrumentedTool
from rollout_server.metrics import Stats, publish_metrics
from rollout_server.node.registry import Registry
from rollout_server.tools.base import ToolResult
from tests.support.waiting import eventually


@pytest.mark.fault(25)
async def test_registrations_answers_and_metrics_are_renewed_in_a_full_redis(world: Any) -> None:
    client, db, keys = world.client(), world.sync, world.keys
    place = {"run": keys.run, "epoch": 1, "step": 1, "number": 1, "phase": "prepare", "members": ("e1/i",)}
    group = {"rank_offsets": (1,), "group": "g", "address": "127.0.0.1", "port": 1, "world_size": 2}
    registry, stats = Registry(client, lease_s=30.0), Stats("rollout", "r1")
    info = EngineInfo(id="e1", url="http://127.0.0.1:1", state=NodeState.READY, incarnation="i")
    view = WeightView(**place, **group)
    await registry.register(info)
    db.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            db.set("x", "y")
        db.pexpire(keys.engine("e1"), 5_000)
        until = db.zscore(keys.engines, "e1")
        await registry.register(info.model_copy(update={"step": 7}))
        await registry.answer(view, ViewAnswer(member="e1/i", number=1, phase="prepared"))
        stats.counts["turns"] = 3
        await processes.write(client, stats.snapshot())
        assert decode_as(EngineInfo, db.hget(keys.engine("e1"), "b")).step == 7
        assert db.pttl(keys.engine("e1")) > 10_000 and db.zscore(keys.engines, "e1") >= until
        assert db.pttl(keys.answers(1, 1)) > 0 and db.hget(keys.answers(1, 1), "e1/i")
        assert decode_as(MetricsSnapshot, db.get(keys.metrics("rollout", "r1"))).values["turns"] == 3
        assert 0 < db.zscore(keys.processes, "rollout:r1") - await client.now() <= LIFETIME_MS / 1000
        db.function_flush()  # of an older learner, or none yet
        with pytest.raises(RedisFull, match="maxmemory reached"):
            await registry.register(info)
    finally:
        db.config_set("maxmemory", 0)
        db.function_load(function_library(), replace=True)


@pytest.mark.parametrize("spoilt", ["too many", "too long", "not finite", "broken"])
async def test_metrics_that_cannot_be_reported_are_logged_once_and_end_nothing(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoilt: str
) -> None:
    monkeypatch.setattr(metrics, "PERIOD_S", 0.02)
    stats, rounds = Stats("rollout", "r1"), 0

    def failing() -> float:
        nonlocal rounds
        rounds += 1
        if spoilt == "broken" and rounds < 6:
            raise ZeroDivisionError
        return 1.0

    stats.gauges["x"] = failing
    bad = {"too many": [f"n{i}" for i in range(1100)], "too long": ["n" * 257], "not finite": ["n"], "broken": []}[
        spoilt
    ]
    stats.counts.update(dict.fromkeys(bad, float("inf") if spoilt == "not finite" else 1))
    publishing = asyncio.create_task(publish_metrics(world.client(), stats))
    await eventually(lambda: rounds > 5, "it goes on")
    stats.counts.clear()
    await eventually(lambda: world.sync.exists(world.keys.metrics("rollout", "r1")), "it is published when it can be")
    assert not publishing.done() and caplog.text.count("cannot publish metrics") == 1
    publishing.cancel()


async def test_a_tool_with_endless_causes_has_a_bounded_number_of_counters() -> None:
    stats, causes = Stats("rollout", "r1"), iter(range(5000))

    class Tool:
        name = "mine"

        async def __call__(self, argument: str) -> ToolResult:
            return ToolResult(error=f"{next(causes)} failed " + "x" * 500)

        async def close(self) -> None: ...

    tool = InstrumentedTool(Tool(), stats)
    for _ in range(2000):
        await tool("x")
    assert len(stats.counts) < 150 and stats.counts["tool_failures_mine/other"] > 1800
    assert stats.snapshot().values["tool_errors_mine"] == 2000
