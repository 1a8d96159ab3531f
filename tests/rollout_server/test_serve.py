"""The whole server around real Redis and engines behind real sockets: from a task to a published group."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from protocol.codec import decode
from protocol.messages import GroupFailed, MetricsSnapshot, Owner, Status, TrajectoryGroup
from protocol.runtime import tracing_export
from protocol.runtime.tracing import Tracer
from protocol.runtime.tracing_export import EndedSpan, SpanQueue
from protocol.versions import PolicyVersion
from rollout_server import server
from rollout_server.metrics import RATE_WINDOW_S, RateGauge
from tests.support import rollout_process
from tests.support.fake_engine import Fault
from tests.support.messages import make_task
from tests.support.metrics_page import check_page
from tests.support.waiting import eventually

V5 = PolicyVersion(1, 5)


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.json()


async def test_a_task_becomes_a_published_group_token_by_token(world, model: Path, tokens) -> None:
    world.target(V5)
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model):
        world.register("e", engine.url, V5)
        world.issue(make_task(1, group_size=3), make_task(2, group_size=3))
        await eventually(lambda: len(world.published()) == 2, "both groups are published")
        requests = list(engine.requests)
    for group in world.published():
        assert isinstance(group, TrajectoryGroup) and (group.producer, group.run) == ("r", world.keys.run)
        assert len(group.trajectories) == 3 and group.versions() == {V5} and group.first_version() == V5
        for trajectory in group.trajectories:
            assert trajectory.status is Status.ANSWERED and (trajectory.turns, trajectory.searches) == (2, 1)
            prompt, search, found, answer = trajectory.segments
            assert [s.owner for s in trajectory.segments] == [
                *(Owner.PROMPT, Owner.POLICY, Owner.ENVIRONMENT, Owner.POLICY)
            ]
            assert search.ids.tolist() == tokens.encode_trusted("<search> a b </search>") and search.engine == "e"
            assert answer.ids.tolist() == tokens.encode_trusted("<answer> c </answer>")
            assert found.query == "a b" and "d e f" in tokens.decode(found.ids.tolist())
            sent = [*prompt.ids, *search.ids, *found.ids]
            assert sent in [r["input_ids"] for r in requests], "what the engine saw is what is trained on"
    assert world.pending() == 0


async def test_two_slow_trajectories_of_five_delay_no_group_of_three(world, model: Path, tokens) -> None:
    world.target(V5)
    settings = {"oversample": 2, "stall_s": 600.0, "generate_timeout_s": 600.0}
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model, **settings) as (url, _):
        engine.faults["/generate"] = Fault(hang=True, after=1, times=2)
        world.register("e", engine.url, V5)
        world.issue(make_task(1, group_size=3))
        await eventually(world.published, "the group is published")
        (group,) = world.published()
        assert len(group.trajectories) == 3 and all(t.status is Status.ANSWERED for t in group.trajectories)

        def at_rest(values: dict[str, float]) -> bool:
            busy = values["requests_in_flight"] or values["trajectories_in_flight"]
            return values["trajectories_cut"] == 2 and not busy

        await eventually(lambda: at_rest(snapshot(world)), "what was cut has left the engine", 10)
        assert snapshot(world)["trajectories"] == 3
        assert (await get(f"{url}/status"))[1]["values"]["groups_published"] == 1
    assert world.pending() == 0


def snapshot(world) -> dict[str, float]:
    raw = world.sync.get(world.keys.metrics("rollout", "r"))
    return dict(decode(raw).values) if raw else {"requests_in_flight": 1.0, "trajectories_cut": 0.0}


def test_a_rate_is_the_increase_per_second_over_the_window() -> None:
    now = count = 0.0
    rate = RateGauge(lambda: count, lambda: now)
    assert rate() == 0.0
    for now in range(1, 2 * int(RATE_WINDOW_S)):
        count += 3.0 if now > RATE_WINDOW_S else 1.0
        rate.tick()
        if now == RATE_WINDOW_S:
            assert rate() == 1.0
    assert rate() == (1.0 + 3.0 * (RATE_WINDOW_S - 1)) / RATE_WINDOW_S


@pytest.mark.fault(22)
async def test_it_reports_itself(world, model: Path, tokens) -> None:
    world.target(V5)
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model) as (url, stop):
        assert await get(f"{url}/health") == (200, {"status": "ok"})
        await asyncio.sleep(0.2)
        status, body = await get(f"{url}/ready")
        assert status == 503 and body == {"ready": False, "reasons": ["no engine accepts requests"]}
        world.register("e", engine.url, V5, max_running=48)
        world.register("old", engine.url, PolicyVersion(1, 2))
        world.register("odd", engine.url, V5, tokenizer="theirs")
        world.issue(make_task(1, group_size=3))
        await eventually(world.published, "a group is published")
        assert await get(f"{url}/ready") == (200, {"ready": True, "reasons": []})
        _, body = await get(f"{url}/status")
        assert body["target"] == "1.5" and body["values"]["groups_published"] == 1
        assert body["values"]["turns"] >= 3 and body["values"]["tokens_generated"] > 0
        engines = {e["id"]: e for e in body["engines"]}
        assert {name: e["takes_requests"] for name, e in engines.items()} == {"e": True, "odd": False, "old": False}
        assert {name: e["unroutable_reason"] for name, e in engines.items()} == {
            **{"e": "", "odd": "a different tokenizer", "old": "3 steps behind, at most 2 allowed"}
        }
        assert (engines["e"]["window"], engines["e"]["requests_in_flight"], engines["e"]["trouble"]) == (48, 0, "")
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
            text = await response.text()
        families = check_page(text)
        lengths = {s.name: s.value for s in families["foray_rollout_response_length_tokens"].samples}
        assert lengths["foray_rollout_response_length_tokens_count"] == 3
        assert lengths["foray_rollout_response_length_tokens_sum"] == 3 * (4 + 3)
        assert families["foray_rollout_trajectories_per_second"].type == "gauge"
        ages = {s.name: s.value for s in families["foray_rollout_task_queue_age_seconds"].samples}
        assert ages["foray_rollout_task_queue_age_seconds_count"] == 1
        assert f'foray_rollout_groups_published_total{{run="{world.keys.run}"}} 1.0' in text
        for counter in ("failovers", "tokens_continued", "tokens_unattributed", "tokens_discarded"):
            assert f'foray_rollout_{counter}_total{{run="{world.keys.run}"}} 0.0' in text
        assert 'foray_rollout_wait_seconds_total{cause="credit",run="' in text

        def snapshot() -> MetricsSnapshot:
            return decode(world.sync.get(world.keys.metrics("rollout", "r")))

        await eventually(lambda: snapshot().values.get("trajectories") == 3, "the metrics reach Redis", 3)
        values = snapshot().values
        expected = {"turns": 6, "searches": 3, "search_errors": 0, "failovers": 0, "groups_in_flight": 0, "stale": 0}
        expected |= {"tokens_continued": 0, "tokens_unattributed": 0, "turns_waiting": 0, "requests_in_flight": 0}
        assert {name: values[name] for name in expected} == expected
        assert values["tokens_generated"] == 3 * (4 + 3) and values["tokens_observed"] > 0
        assert "reward/em" in values and "event_loop_lag_s" in values
        assert {"credit", "retriever"} <= snapshot().waits.keys()
        assert world.sync.zscore(world.keys.processes, "rollout:r") > world.sync.time()[0]
        stop.requested.set()
        await eventually(
            lambda: not world.sync.exists(world.keys.metrics("rollout", "r")), "it takes itself off the list"
        )


@pytest.mark.fault(5)
async def test_an_engine_crash_under_load_loses_turns_and_no_group(world, model: Path, tokens) -> None:
    world.target(V5)
    async with (
        rollout_process.talker(tokens, turns=3, pace_s=0.1) as a,
        rollout_process.talker(tokens, turns=3, pace_s=0.1) as b,
        rollout_process.server(world, model, stream_interval=1) as (url, _),
    ):
        world.register("a", a.url, V5)
        world.register("b", b.url, V5)
        world.issue(*(make_task(seq, group_size=4) for seq in range(1, 11)))
        await eventually(lambda: a.tokens_made > 25 and b.tokens_made > 25, "both are in the middle of turns")
        await a.stop()
        await eventually(lambda: len(world.published()) == 10, "every group is published", 20)
        _, body = await get(f"{url}/status")
    groups = world.published()
    assert sorted(g.seq for g in groups) == list(range(1, 11)) and {g.attempt for g in groups} == {1}
    assert all(t.status is Status.ANSWERED and t.turns == 4 for g in groups for t in g.trajectories)
    whole = {tuple(t.ids.tolist()[-3:]) for g in groups for t in g.trajectories}
    assert whole == {tuple(tokens.encode_trusted("<answer> c </answer>"))}
    values = body["values"]
    assert values["failovers"] > 0 and values["tokens_continued"] > 0 and values["tokens_unattributed"] == 0
    said = [s.ids.tolist() for g in groups for t in g.trajectories for s in t.segments if s.owner is Owner.POLICY]
    assert [ids for ids in said if ids not in (tokens.encode_trusted("<search> a b </search>"), list(*whole))] == []
    (dead,) = (e for e in body["engines"] if e["id"] == "a")
    assert "at a: " in dead["trouble"], "and it is named"


async def test_a_late_engine_takes_traffic(world, model: Path, tokens) -> None:
    world.target(V5)
    async with (
        rollout_process.talker(tokens, latency_s=0.02) as a,
        rollout_process.talker(tokens, latency_s=0.02) as b,
        rollout_process.server(world, model, concurrency_groups=4),
    ):
        world.register("a", a.url, V5)
        world.issue(*(make_task(seq, group_size=4) for seq in range(1, 60)))
        await eventually(lambda: len(world.published()) > 5, "the first engine works")
        world.register("b", b.url, V5)
        await eventually(lambda: len(b.requests) > 10, "the late one takes traffic", 3)


@pytest.mark.fault(50)
async def test_a_run_that_is_done_leases_nothing_until_a_learner_goes_on(world, model: Path, tokens) -> None:
    world.target(V5, state="done")
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model):
        world.register("e", engine.url, V5)
        await asyncio.sleep(1.3)  # a read that began before the gate closed has ended
        world.issue(make_task(1, group_size=2))
        await asyncio.sleep(0.3)
        assert world.published() == [] and world.pending() == 0
        world.target(V5)
        await eventually(world.published, "a learner that starts again is served")


async def test_a_group_that_falls_too_far_behind_is_given_another_attempt(world, model: Path, tokens) -> None:
    world.target(V5)
    async with rollout_process.talker(tokens, latency_s=0.3) as engine, rollout_process.server(world, model):
        world.register("e", engine.url, V5)
        world.issue(make_task(1, group_size=2))
        await eventually(lambda: len(engine.requests) == 2, "the first turns are under way")
        world.target(PolicyVersion(1, 8))
        engine.version = "1.8"
        world.register("e", engine.url, PolicyVersion(1, 8))
        await eventually(world.published, "published after all")
    (group,) = world.published()
    assert isinstance(group, TrajectoryGroup) and group.attempt in (1, 2)
    assert group.first_version() == PolicyVersion(1, 8)


async def test_a_task_that_fails_every_time_is_given_up_after_its_attempts(world, model: Path, tokens) -> None:
    world.target(V5)
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model, generate_attempts=1):
        engine.faults["/generate"] = Fault(status=400)
        world.register("e", engine.url, V5)
        world.issue(make_task(1, group_size=2))
        await eventually(world.published, "it is given up")
    (message,) = world.published()
    assert isinstance(message, GroupFailed)
    assert (message.seq, message.attempt, message.reason) == (1, 3, "refused")
    assert len(engine.requests) == 0 and engine.calls.count("/generate") == 6 and world.pending() == 0


@pytest.mark.fault(4, 23)
async def test_a_redis_that_is_killed_costs_no_group(own_world, model: Path, tokens) -> None:
    world = own_world
    world.target(V5)
    async with rollout_process.talker(tokens, latency_s=0.3) as engine, rollout_process.server(world, model):
        world.register("e", engine.url, V5)
        world.issue(*(make_task(seq, group_size=2) for seq in range(1, 5)))
        await eventually(lambda: len(engine.requests) >= 8, "all groups are under way")
        world.process.kill()
        await eventually(lambda: len(engine.requests) >= 16, "they go on without Redis")
        await asyncio.sleep(0.5)
        await asyncio.to_thread(world.process.start)
        await eventually(lambda: len(world.published()) == 4, "and are published when it is back", 15)
    assert sorted(g.seq for g in world.published()) == [1, 2, 3, 4] and world.pending() == 0


@pytest.mark.fault(2)
async def test_sigterm_finishes_what_is_under_way_and_ends_with_status_0(
    world, model: Path, tokens, tmp_path: Path
) -> None:
    world.target(V5)
    async with rollout_process.talker(tokens, latency_s=0.5) as engine:
        world.register("e", engine.url, V5)
        argv = [f"run.id={world.keys.run}", f"run.model={model}", "rollout.search.type=none"]
        argv += ["rollout.episode.template=demo", "rollout.concurrency_groups=1", "--port-file", str(tmp_path / "port")]
        process = rollout_process.spawn(argv, tmp_path, FORAY_REDIS_URL=world.url)
        try:
            world.issue(make_task(1, group_size=2), make_task(2, group_size=2))
            await eventually(lambda: engine.requests, "the first group is under way", 30)
            process.terminate()
            await eventually(lambda: process.poll() is not None, "it ends", 15)
        finally:
            process.kill()
            errors = process.communicate()[1].decode()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors and "listening on http://127.0.0.1:" in errors
    assert [m.seq for m in world.published()] == [1], "the group under way is finished, the next is not begun"
    assert world.sync.xinfo_groups(world.keys.tasks)[0]["consumers"] == 0


async def test_without_redis_it_says_what_to_do(tmp_path: Path) -> None:
    process = rollout_process.spawn([], tmp_path)
    errors = (await asyncio.to_thread(process.communicate))[1].decode()
    assert process.returncode == 2
    assert "no Redis is configured" in errors and "run.redis_url=" in errors and "Traceback" not in errors


async def test_the_spans_of_the_last_groups_are_exported_before_it_ends(
    world, model: Path, tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing_export, "WAIT_S", 1.0)  # the exporter waits for more spans
    exported: list[EndedSpan] = []
    sink = SpanQueue(lambda spans: exported.extend(spans) or True)  # type: ignore[func-returns-value]
    monkeypatch.setattr(server, "build_tracer", lambda run, *_: Tracer(sink, run=run.id))
    world.target(V5)
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model):
        world.register("e", engine.url, V5)
        world.issue(make_task(1))
        await eventually(world.published, "the group is published")
    assert exported and sink.exported == len(exported) and sink.dropped == 0
