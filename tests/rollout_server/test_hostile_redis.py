"""Corrupted keys: the server waits, logs the key and what to do, and continues after it was repaired."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import redis

from protocol.codec import decode
from protocol.errors import StateLost
from protocol.keys import TASK_GROUP, TRAJ_GROUP
from protocol.messages import GroupFailed, MetricsSnapshot
from protocol.runtime.redis.aio import RedisClient
from protocol.runtime.redis.errors import RedisFull, RedisRefused, RedisUnavailable
from protocol.versions import PolicyVersion
from tests.support import rollout_process
from tests.support.messages import make_task
from tests.support.waiting import eventually

V5 = PolicyVersion(1, 5)
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"


def of_another_type(world: Any, key: str) -> None:
    world.sync.delete(key)
    world.sync.lpush(key, "of another type")


def full_to_the_last_id(world: Any, key: str) -> None:
    world.sync.xadd(key, {"x": "y"}, id=LAST_ID)


def refusal(world: Any) -> str:
    """What the server says of it in its metrics."""
    raw = world.sync.get(world.keys.metrics("rollout", "r"))
    found = decode(raw) if raw else None
    return found.text.get("redis_refusal", "") if isinstance(found, MetricsSnapshot) else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("traj", full_to_the_last_id),
        ("traj", of_another_type),
        ("tasks", of_another_type),
        ("engines", of_another_type),
        ("target", of_another_type),
        ("meta", of_another_type),
    ],
)
async def test_a_key_that_cannot_be_used_is_waited_for_and_named_and_the_server_goes_on(
    world, model: Path, tokens, caplog: pytest.LogCaptureFixture, name: str, spoil: Any
) -> None:
    key = getattr(world.keys, name)
    spoil(world, key)
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model):
        if name != "target":
            world.target(V5)
        if name != "engines":
            world.register("e", engine.url, V5)
        if name != "tasks":
            world.issue(make_task(1, group_size=2))
        await eventually(lambda: key in refusal(world), "the metrics name the key")
        assert f"DEL {key}" in refusal(world)
        kinds = [fields[b"kind"] for _, fields in world.sync.xrange(world.keys.events)]
        await eventually(
            lambda: any(f[b"kind"] == b"redis-refused" for _, f in world.sync.xrange(world.keys.events)), f"{kinds}"
        )
        said = [r for r in caplog.records if r.levelno == logging.ERROR and f"DEL {key}" in r.getMessage()]
        assert 1 <= len(said) <= 6, "once for each activity"
        world.sync.delete(key)
        for stream, group in ((world.keys.tasks, TASK_GROUP), (world.keys.traj, TRAJ_GROUP)):
            if not world.sync.exists(stream):
                world.sync.xgroup_create(stream, group, "0", mkstream=True)
        if name == "target":
            world.target(V5)
        if name == "engines":
            world.register("e", engine.url, V5)
        if name == "tasks":
            world.issue(make_task(1, group_size=2))
        await eventually(lambda: [m.seq for m in world.published()] == [1], "it goes on", 20)
    assert world.pending() == 0


async def test_statistics_and_what_informs_people_hold_up_nothing(world, model: Path, tokens) -> None:
    keys = world.keys
    world.target(V5)
    world.sync.hset(keys.tokens, mapping={"published": 2**63 - 1, "rejected": "abc"})
    for key in (keys.dlq, keys.events, keys.processes):
        of_another_type(world, key)
    world.sync.xadd(keys.tasks, {"seq": 1, "b": b"\xc1 not msgpack"})
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model):
        world.register("e", engine.url, V5)
        world.issue(make_task(2, group_size=2))
        await eventually(lambda: len(world.published()) == 2, "both come through")
    failed, group = world.published()
    assert isinstance(failed, GroupFailed) and failed.seq == 1 and group.seq == 2
    assert world.pending() == 0


async def raised_by(client: RedisClient, *command: Any) -> type[BaseException] | None:
    try:
        await client.batch(command)
    except Exception as error:
        return type(error)
    return None


async def test_only_answers_of_redis_are_waited_for(world) -> None:
    client, keys = world.client(), world.keys
    world.sync.set(keys.requeue, "x")
    world.sync.hset(keys.tokens, "published", "abc")
    expected: dict[type[BaseException], list[tuple[Any, ...]]] = {
        RedisRefused: [
            ("HGET", keys.requeue, "b"),
            ("XADD", keys.requeue, "*", "a", "b"),
            ("HINCRBY", keys.tokens, "published", 1),
            ("INCR", keys.requeue),
        ],
        StateLost: [("XPENDING", keys.requeue + "none", "g"), ("FCALL", "foray_none", 0)],
        # an invalid command is a bug in Foray: it must be raised
        redis.ResponseError: [
            ("NOSUCHCOMMAND",),
            ("GET",),
            ("SET", "a", "b", "NOSUCHWORD"),
            ("XRANGE", keys.traj, "x", "+"),
        ],
        redis.DataError: [("GET", {"no": "bytes"})],
    }
    for kind, commands in expected.items():
        for command in commands:
            assert await raised_by(client, *command) is kind, command
    assert issubclass(RedisRefused, RedisUnavailable) and not issubclass(RedisRefused, RedisFull)
    with pytest.raises(TypeError):
        async with client.commands():
            len(None)  # type: ignore[arg-type]
    assert client.refused == 4


async def test_a_refusal_names_its_key_and_is_forgotten(world, monkeypatch: pytest.MonkeyPatch) -> None:
    from protocol.runtime.redis import aio as redis_client

    client, keys = world.client(), world.keys
    of_another_type(world, keys.tasks)
    for ask in (lambda: client.read(keys.tasks, TASK_GROUP, "c", 1), lambda: client.batch(("XLEN", keys.tasks))):
        with pytest.raises(RedisRefused, match=f"^the key {keys.tasks} has .*WRONGTYPE.*`DEL {keys.tasks}`"):
            await ask()
    assert client.refusal.startswith(f"the key {keys.tasks} ")
    monkeypatch.setattr(redis_client, "REFUSAL_S", 0.0)
    assert client.refusal == ""
