"""At maxmemory registrations, answers and metrics of rollout servers and nodes stay alive."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from protocol.codec import decode_as
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, ViewAnswer, WeightView
from protocol.runtime.redis.errors import RedisFull
from protocol.runtime.redis.server import function_library
from rollout_server.metrics import Stats, _write
from rollout_server.node.registry import Registry


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
        await _write(client, stats)
        assert decode_as(EngineInfo, db.hget(keys.engine("e1"), "b")).step == 7
        assert db.pttl(keys.engine("e1")) > 10_000 and db.zscore(keys.engines, "e1") >= until
        assert db.pttl(keys.answers(1, 1)) > 0 and db.hget(keys.answers(1, 1), "e1/i")
        assert decode_as(MetricsSnapshot, db.get(keys.metrics("rollout", "r1"))).values["turns"] == 3
        assert db.zscore(keys.processes, "rollout:r1")
        db.function_flush()  # of an older learner, or none yet
        with pytest.raises(RedisFull, match="maxmemory reached"):
            await registry.register(info)
    finally:
        db.config_set("maxmemory", 0)
        db.function_load(function_library(), replace=True)
