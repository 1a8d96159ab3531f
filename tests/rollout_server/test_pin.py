"""The evaluation pin: how long consecutive requests postpone weight swaps."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import NodeState
from protocol.runtime.redis.aio import RedisClient
from protocol.versions import PolicyVersion, VersionPin
from rollout_server.api import evaluation_pin as module
from rollout_server.api.evaluation_pin import EvaluationPin
from rollout_server.dispatch.fleet import Fleet
from rollout_server.metrics import Stats
from rollout_server.server import model_digest
from tests.support.waiting import eventually

V3, V4 = PolicyVersion(1, 3), PolicyVersion(1, 4)
REST_S = 0.4


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    monkeypatch.setattr(module, "GAP_S", REST_S)
    monkeypatch.setattr(module, "REST_S", REST_S)


def a_pin(world, *, max_s: float = 0.4) -> tuple[EvaluationPin, Stats]:
    redis, stats = world.client(), Stats("rollout", "r0")
    return EvaluationPin(redis, Fleet(redis, stats.waits, poll_s=1.0), stats, max_s=max_s, wait_s=10.0), stats


async def gaps(world, pin: EvaluationPin, *, requests: int = 10) -> list[float]:
    """Seconds without the key before each of `requests` evaluations in a row, after the first."""
    found, ended = [], time.monotonic()
    for _ in range(requests):
        async with pin.hold():
            found.append(time.monotonic() - ended)
            assert world.sync.exists(world.keys.evaluation)
            await asyncio.sleep(0.05)
        assert not world.sync.exists(world.keys.evaluation)
        ended = time.monotonic()
    return found[1:]


async def test_requests_in_a_row_leave_a_gap_in_which_new_weights_are_loaded(world, quick: None) -> None:
    world.target(V4)
    world.register("e", "http://127.0.0.1:1", V3)
    assert max(await gaps(world, a_pin(world)[0])) >= REST_S * 0.9


async def test_requests_in_a_row_need_no_gap_where_every_engine_is_at_the_newest_version(
    world, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REST_S", 60.0)
    monkeypatch.setattr(module, "GAP_S", 60.0)
    world.target(V4)
    world.register("e", "http://127.0.0.1:1", V4)
    async with asyncio.timeout(30):
        await gaps(world, a_pin(world)[0])


async def test_requests_in_a_row_need_no_gap_where_engines_for_evaluation_serve(
    world, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REST_S", 60.0)
    world.target(V4)
    world.register("e", "http://127.0.0.1:1", V3, role="eval")
    world.register("trains", "http://127.0.0.1:1", V3)
    async with asyncio.timeout(30):
        await gaps(world, a_pin(world)[0])


async def test_only_evaluations_that_put_off_new_weights_are_reported_as_such(world, quick: None) -> None:
    world.target(V4)
    world.register("e", "http://127.0.0.1:1", V3)
    pin, stats = a_pin(world)
    assert stats.values()["pinned_evaluations"] == 0
    async with pin.hold(), pin.hold():
        assert stats.values()["pinned_evaluations"] == 2
    assert stats.values()["pinned_evaluations"] == 0
    world.register("only-evaluates", "http://127.0.0.1:1", V3, role="eval")
    async with pin.hold():
        assert stats.values()["pinned_evaluations"] == 0


async def test_a_pin_is_renewed_five_times_in_its_lifetime_and_no_more(
    world, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIN_MS", 500)
    world.register("e", "http://127.0.0.1:1", V3)
    pin, _ = a_pin(world, max_s=60.0)
    sets, batch = 0, RedisClient.batch

    async def counted(redis: RedisClient, *commands: tuple[Any, ...], **more: Any) -> list[Any]:
        nonlocal sets
        sets += any(command[0] == "SET" for command in commands)
        return await batch(redis, *commands, **more)

    monkeypatch.setattr(RedisClient, "batch", counted)
    async with pin.hold():
        began = time.monotonic()
        await eventually(lambda: sets > 3, "it was renewed")
        assert sets <= 2 + (time.monotonic() - began) / 0.1 and world.sync.exists(world.keys.evaluation)


async def test_a_pin_that_another_server_has_set_meanwhile_is_left_to_it(world, quick: None) -> None:
    world.register("e", "http://127.0.0.1:1", V3)
    theirs = str(VersionPin("another server"))
    async with a_pin(world)[0].hold():
        world.sync.set(world.keys.evaluation, theirs)
    assert world.sync.get(world.keys.evaluation).decode() == theirs


def test_two_models_of_one_shape_have_two_digests(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"w" * 5_000_000)
    (tmp_path / "b" / "model.safetensors").write_bytes(b"v" * 5_000_000)
    (tmp_path / "c" / "model.safetensors").unlink()
    digests = [model_digest(tmp_path / name) for name in ("a", "a", "b", "c")]
    assert digests[0] == digests[1] and len(set(digests)) == 3


async def test_a_pin_without_an_engine_that_serves_is_taken_back_so_that_they_can_load(
    world, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.3)
    world.target(V4)
    world.register("e", "http://127.0.0.1:1", V3)
    pin, _ = a_pin(world)

    async def evaluate() -> None:
        async with pin.hold():
            assert world.sync.exists(world.keys.evaluation)

    evaluation = asyncio.create_task(evaluate())
    await eventually(lambda: world.sync.exists(world.keys.evaluation), "pinned")
    world.register("e", "http://127.0.0.1:1", V3, state=NodeState.SYNCING)
    await eventually(lambda: not world.sync.exists(world.keys.evaluation), "taken back", module.PIN_MS / 3000)
    world.register("e", "http://127.0.0.1:1", V4)
    await asyncio.wait_for(evaluation, 10)
