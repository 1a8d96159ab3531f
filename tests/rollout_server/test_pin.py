"""The evaluation pin: how long consecutive requests postpone weight swaps."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from protocol.versions import PolicyVersion
from rollout_server.api import evaluation_pin as module
from rollout_server.api.evaluation_pin import EvaluationPin
from rollout_server.dispatch.fleet import Fleet
from rollout_server.metrics import Stats
from rollout_server.server import model_digest

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


def test_two_models_of_one_shape_have_two_digests(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"w" * 5_000_000)
    (tmp_path / "b" / "model.safetensors").write_bytes(b"v" * 5_000_000)
    (tmp_path / "c" / "model.safetensors").unlink()
    digests = [model_digest(tmp_path / name) for name in ("a", "a", "b", "c")]
    assert digests[0] == digests[1] and len(set(digests)) == 3
