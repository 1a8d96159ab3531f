"""Routing: the choice of the engine, and that a turn lost with its engine is sampled again at another one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.messages import EngineInfo, NodeState, Sampling
from protocol.runtime.http.body import bounded_session
from protocol.runtime.metrics import WaitTimer
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet, FleetTable
from rollout_server.engine import admission
from rollout_server.engine.admission import RequestQueue, incarnation_key
from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from rollout_server.engine.client import EngineCall, SglangClient
from rollout_server.engine.continuation import TurnAssembler
from rollout_server.engine.decoding import ReceivedTokens
from rollout_server.engine.health import EJECTION_S, LIMIT, LONGEST_RETRY_S, EngineHealth
from rollout_server.engine.router import Router, TurnLimits
from rollout_server.engine.selection import Candidate, Work, pick_engine
from tests.support.fake_engine import FakeServer, Fault, next_ids
from tests.support.waiting import eventually

V5 = PolicyVersion(1, 5)


class Table(Fleet):
    """A fleet with scripted tables instead of Redis."""

    def __init__(self) -> None:
        super().__init__(None, WaitTimer(), poll_s=1.0)  # type: ignore[arg-type]

    def publish(self, *engines: EngineInfo, target: PolicyVersion | None = V5) -> None:
        self.install(FleetTable({e.id: e for e in engines}, target))


def engine(name: str, url: str = "", version: PolicyVersion = V5, **facts) -> EngineInfo:
    return EngineInfo(id=name, url=url, epoch=version.epoch, step=version.step, **({"state": NodeState.READY} | facts))


def request(ids: list[int], *, session: str = "s", group: str = "g", pinned: bool = False, n: int = 8):
    return GenerateRequest(
        ids=ids, session=session, group=group, max_new_tokens=n, sampling=Sampling(), stop=("</answer>",), pinned=pinned
    )


@contextlib.asynccontextmanager
async def routing(table: Fleet, **settings) -> AsyncIterator[Router]:
    limits = {"timeout_s": 5.0, "attempts": 4, "wait_s": 5.0}
    limits |= {name: settings.pop(name) for name in [*limits, "stall_s"] if name in settings}
    interval = settings.pop("interval", 8)
    given = {"max_lag": 2, "vocab_size": 1000, "limits": TurnLimits(**limits)} | settings
    async with bounded_session() as session:

        def connect(info: EngineInfo) -> SglangClient:
            return SglangClient(session, info.url, name=info.id, adapter=info.adapter, stream_interval=interval)

        yield Router(table, connect, WaitTimer(), **given)


async def play(router: Router, session: str, turns: int, *, pause: float = 0.0) -> list[int]:
    """A trajectory: prompt, then `turns` completions with an observation of two tokens after each."""
    ids = [1, 2, len(session)]
    for _ in range(turns):
        completion = await router(request(ids, session=session, group=session))
        ids += [*completion.ids, 5, 6]
        await asyncio.sleep(pause)
    return ids


def expected(session: str, turns: int) -> list[int]:
    ids = [1, 2, len(session)]
    for _ in range(turns):
        ids += [*next_ids(ids, 8), 5, 6]
    return ids


@pytest.mark.fault(5)
async def test_a_turn_whose_engine_crashes_is_sampled_again_and_no_token_is_lost_or_duplicated() -> None:
    table = Table()
    async with (
        FakeServer(version="1.5", latency_s=0.05) as a,
        FakeServer(version="1.5", latency_s=0.05) as b,
        routing(table) as router,
    ):
        table.publish(engine("a", a.url), engine("b", b.url))
        names = [f"{'x' * i}" for i in range(1, 9)]
        playing = asyncio.gather(*(play(router, name, 6) for name in names))
        await eventually(lambda: len(a.requests) > 6 and len(b.requests) > 6, "both engines are in the middle of turns")
        await a.stop()
        results = await asyncio.wait_for(playing, 20)
    assert results == [expected(name, 6) for name in names]
    assert router.counts["failovers"] >= 1 and router.inflight.in_flight == 0


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault(drop=True),
        Fault(hang=True),
        Fault(body={"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort", "message": "Aborted"}}}),
        Fault(
            body={
                "output_ids": [1],
                "meta_info": {
                    "finish_reason": {"type": "stop"},
                    "weight_version": "1.5",
                    "output_token_logprobs": [[float("nan"), 1, None]],
                },
            }
        ),
    ],
    ids=["500", "dropped", "hangs", "aborts", "nan"],
)
@pytest.mark.fault(5, 6, 20, 21)
async def test_a_faulty_engine_costs_one_turn_and_not_the_trajectory(fault: Fault) -> None:
    table = Table()
    async with FakeServer(version="1.5") as a, FakeServer(version="1.5") as b, routing(table, timeout_s=0.3) as router:
        table.publish(engine("a", a.url), engine("b", b.url))
        a.faults["/generate"] = fault
        completion = await router(request([1, 2, 3]))
    assert completion.ids == next_ids([1, 2, 3], 8) and completion.engine == "b"
    assert router.counts["failovers"] == 1 and router.health.total == 1


async def test_a_request_that_the_engine_refuses_is_not_sent_to_another() -> None:
    table = Table()
    async with FakeServer(version="1.5") as a, FakeServer(version="1.5") as b, routing(table) as router:
        table.publish(engine("a", a.url), engine("b", b.url))
        a.faults["/generate"] = b.faults["/generate"] = Fault(status=422)
        with pytest.raises(EngineError) as caught:
            await router(request([1]))
        assert caught.value.cause == "refused" and len(a.calls) + len(b.calls) == 1


async def test_a_prompt_with_an_id_that_the_model_does_not_have_reaches_no_engine() -> None:
    """Real SGLang dies of it."""
    table = Table()
    async with FakeServer(version="1.5") as a, routing(table) as router:
        table.publish(engine("a", a.url))
        with pytest.raises(EngineError) as caught:
            await router(request([1, 1000]))
        assert caught.value.fault == "request" and a.calls == []


@pytest.mark.fault(21)
async def test_malformed_data_from_every_engine_ends_after_the_allowed_attempts() -> None:
    table = Table()
    async with FakeServer(version="1.5") as a, routing(table, attempts=2) as router:
        table.publish(engine("a", a.url))
        a.faults["/generate"] = Fault(body={"output_ids": []})
        with pytest.raises(EngineError) as caught:
            await router(request([1]))
        assert caught.value.cause == "bad_output" and len(a.calls) == 2


async def test_a_trajectory_stays_with_its_engine_and_a_group_starts_together() -> None:
    table = Table()
    async with (
        FakeServer(version="1.5", latency_s=0.01) as a,
        FakeServer(version="1.5", latency_s=0.01) as b,
        routing(table) as router,
    ):
        table.publish(engine("a", a.url), engine("b", b.url))
        used: dict[str, Counter[str]] = {}

        async def trajectory(group: str, session: str) -> None:
            for turn in range(4):
                done = await router(request([1] * 300 * (turn + 1), session=session, group=group))
                used.setdefault(group, Counter())[done.engine] += 1

        await asyncio.gather(*(trajectory(f"g{g}", f"g{g}-{i}") for g in range(6) for i in range(3)))
    assert all(len(engines) == 1 for engines in used.values()), used
    assert {next(iter(engines)) for engines in used.values()} == {"a", "b"}, "groups are spread"


async def test_a_late_engine_is_given_work_at_once() -> None:
    table = Table()
    async with (
        FakeServer(version="1.5", latency_s=0.05) as a,
        FakeServer(version="1.5", latency_s=0.05) as b,
        routing(table) as router,
    ):
        table.publish(engine("a", a.url))
        playing = asyncio.gather(*(play(router, "x" * i, 8) for i in range(1, 25)))
        await eventually(lambda: len(a.requests) >= 24, "the first engine has everything")
        table.publish(engine("a", a.url), engine("b", b.url))
        await eventually(lambda: len(b.requests) >= 4, "old trajectories move to the late one", 2.0)
        results = await playing
    assert results == [expected("x" * i, 8) for i in range(1, 25)]


@pytest.mark.parametrize(
    "unfit",
    [
        {"version": PolicyVersion(1, 2)},
        {"version": PolicyVersion(0, 5)},
        {"state": NodeState.LOADING},
        {"state": NodeState.QUARANTINED},
        {"state": NodeState.DRAINING},
        {"role": "eval"},
        {"tokenizer": "another"},
    ],
    ids=["too old", "old epoch", "loading", "quarantined", "draining", "evaluation", "tokenizer"],
)
@pytest.mark.fault(22)
async def test_an_engine_that_is_not_routable_gets_no_training_traffic(unfit: dict) -> None:
    table = Table()
    async with (
        FakeServer(version="1.5") as a,
        FakeServer(version="1.5") as b,
        routing(table, tokenizer="ours") as router,
    ):
        table.publish(engine("a", a.url, **unfit), engine("b", b.url, PolicyVersion(1, 3), tokenizer="ours"))
        done = await asyncio.gather(*(router(request([i], session=str(i), group=str(i))) for i in range(12)))
        assert {c.engine for c in done} == {"b"} and a.calls == []


async def test_pinned_requests_go_to_any_ready_engine_and_rather_to_one_for_evaluation() -> None:
    table = Table()
    async with FakeServer(version="1.5") as a, FakeServer(version="1.5") as b, routing(table) as router:
        old = engine("a", a.url, PolicyVersion(1, 0))
        table.publish(old, target=PolicyVersion(2, 9))
        assert (await router(request([1], pinned=True))).engine == "a"
        table.publish(old, engine("b", b.url, role="eval"))
        assert (await router(request([1], session="t", pinned=True))).engine == "b"


async def test_a_request_waits_for_an_engine_and_goes_on_when_one_comes() -> None:
    table = Table()
    async with FakeServer(version="1.5") as a, routing(table) as router:
        table.publish(target=V5)
        waiting = asyncio.create_task(router(request([1])))
        await asyncio.sleep(0.15)
        assert not waiting.done()
        table.publish(engine("a", a.url))
        assert (await asyncio.wait_for(waiting, 1.0)).engine == "a"
        assert 0.1 < router._queue._waits.seconds()["engine"] < 1.0


async def test_without_any_engine_the_wait_ends_at_its_deadline() -> None:
    table = Table()
    async with routing(table, wait_s=0.2) as router:
        with pytest.raises(EngineError) as caught:
            await router(request([1]))
    assert caught.value.cause == "no_engine"


@pytest.mark.slow
async def test_time_in_the_queue_is_not_time_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog of more than wait_s, and then a weight update of the only engine."""
    monkeypatch.setattr(admission, "RECHECK_S", 0.05)
    table = Table()
    async with FakeServer(version="1.5", latency_s=60.0) as a, routing(table, wait_s=1.0, timeout_s=60.0) as router:
        table.publish(engine("a", a.url, max_running=1))
        first = asyncio.create_task(router(request([1], session="first")))
        await eventually(lambda: len(a.requests) == 1, "the engine is full")
        queued = [asyncio.create_task(router(request([i], session=str(i)))) for i in (2, 3)]
        await asyncio.sleep(1.2)
        for _ in range(3):
            table.publish(engine("a", a.url, max_running=1, state=NodeState.LOADING))
            await asyncio.sleep(0.4)
            table.publish(engine("a", a.url, max_running=1))
        assert not any(turn.done() for turn in queued)
        a.latency_s = 0.0
        first.cancel()
        assert [(await turn).ids for turn in queued] == [next_ids([2], 8), next_ids([3], 8)]
        table.publish(engine("a", a.url, max_running=1, state=NodeState.LOADING))
        with pytest.raises(EngineError, match="no engine was usable for 1 s"):
            await asyncio.wait_for(router(request([4])), 10.0)


async def test_a_queue_waits_for_an_engine_from_when_the_last_one_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, clock, lacking, ticks = asyncio.get_running_loop(), [1000.0], ["window"], []
    monkeypatch.setattr(loop, "time", lambda: clock[0])
    monkeypatch.setattr(loop, "call_later", lambda _, tick: ticks.append(tick))
    queue = RequestQueue(lambda *_, **__: None, lambda *_: None, lambda _: lacking[0], WaitTimer(), wait_s=10.0)
    turn = asyncio.create_task(queue.acquire(request([1]), {}))
    await asyncio.sleep(0)
    lacking[0] = "engine"
    for clock[0], waiting in ((1060.0, 1), (1069.0, 1), (1070.0, 0)):
        ticks.pop()()
        assert queue.waiting(pinned=False) == waiting
    with pytest.raises(EngineError, match="no engine was usable for 10 s"):
        await turn


async def test_a_dropped_connection_after_a_long_wait_in_the_queue_is_tried_again() -> None:
    table = Table()
    async with FakeServer(version="1.5", latency_s=60.0) as a, routing(table, wait_s=1.5, timeout_s=60.0) as router:
        table.publish(engine("a", a.url, max_running=1))
        first = asyncio.create_task(router(request([1], session="first")))
        await eventually(lambda: len(a.requests) == 1, "the engine is full")
        queued = asyncio.create_task(router(request([2])))
        await asyncio.sleep(1.7)
        a.latency_s, a.faults["/generate"] = 0.0, Fault(drop=True, times=1)
        first.cancel()
        assert (await asyncio.wait_for(queued, 10.0)).ids == next_ids([2], 8)
        assert router.counts["engine_unreachable"] == 1


async def test_the_only_engine_may_be_restarted_under_a_request() -> None:
    """An unreachable engine does not use up attempts: the turn waits until it is back."""
    table = Table()
    async with FakeServer(version="1.5") as a, routing(table, attempts=1, wait_s=20.0) as router:
        table.publish(engine("a", a.url))
        await router(request([1]))
        await a.stop()
        waiting = asyncio.create_task(router(request([1, 2])))
        await asyncio.sleep(1.2)
        assert not waiting.done()
        await a.start()
        completion: Completion = await asyncio.wait_for(waiting, 10.0)
    assert completion.ids == next_ids([1, 2], 8) and router.counts["failovers"] >= 2


@pytest.mark.fault(6)
async def test_turns_wait_for_capacity_the_oldest_group_first() -> None:
    table = Table()
    async with FakeServer(version="1.5", latency_s=0.05) as a, routing(table) as router:
        table.publish(engine("a", a.url, max_running=2))
        order: list[str] = []

        async def turn(group: str, number: int) -> None:
            await router(request([number], session=f"{group}{number}", group=group))
            order.append(group)

        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(turn("old", number))
            await asyncio.sleep(0)
            for number in range(4):
                tasks.create_task(turn("young", number))
            await asyncio.sleep(0)
            for number in range(4, 8):
                tasks.create_task(turn("old", number))
            await eventually(lambda: router.waiting == 10, "two go, ten wait")
            assert a._in_flight <= 2 and router.inflight.in_flight == 2 and not router.backpressure()
        assert order == ["old"] * 8 + ["young"] * 4
        assert router.waiting == 0 and router._queue._waits.seconds()["window"] > 0.2


async def test_a_later_turn_skips_the_queue_of_the_engine_with_its_prefix() -> None:
    table = Table()
    async with FakeServer(version="1.5", latency_s=0.2) as a, routing(table) as router:
        table.publish(engine("a", a.url, max_running=2))
        await router(request([1], session="begun", group="old"))
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(router(request([number], session=f"new{number}", group="old")))
            await eventually(lambda: router.waiting == 2, "two go, two wait")
            tasks.create_task(router(request([1, 2], session="begun", group="old")))
            await eventually(lambda: router.inflight.in_flight == 3, "the later turn goes beyond the window")
            tasks.create_task(router(request([1, 2, 3], session="begun", group="old")))
            await eventually(lambda: router.waiting == 3, "and one more does not")


async def test_a_turn_does_not_skip_the_queue_of_an_engine_that_failed_it() -> None:
    table = Table()
    async with (
        FakeServer(version="1.5") as a,
        FakeServer(version="1.5", latency_s=0.05) as b,
        routing(table) as router,
    ):
        table.publish(engine("a", a.url, max_running=2))
        await router(request([1], session="begun", group="old"))
        a.latency_s = 1.5  # what it has now does not end before the line has moved on
        table.publish(engine("a", a.url, max_running=2), engine("b", b.url, max_running=2))
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(router(request([number], session=f"new{number}", group="old")))
            await eventually(
                lambda: router.waiting >= 4 and len(a.requests) >= 2, "both windows are full, and some wait"
            )
            a.faults["/generate"] = Fault(status=500, times=1)
            turn = tasks.create_task(router(request([1, 2], session="begun", group="old")))
        assert (await turn).engine == "b"
        assert a.faults["/generate"].times == 0 and not any(body["input_ids"] == [1, 2] for body in a.requests)


async def test_training_and_evaluation_take_turns_at_an_engine_that_both_use() -> None:
    table = Table()
    async with FakeServer(version="1.5", latency_s=0.02) as a, routing(table) as router:
        table.publish(engine("a", a.url, max_running=1))
        ended: list[str] = []

        async def loop(name: str, pinned: bool) -> None:
            for turn in range(8):
                await router(request([turn], session=f"{name}{turn}", group=f"{name}{turn}", pinned=pinned))
                ended.append("eval" if pinned else "train")

        await asyncio.gather(*(loop(f"t{i}", False) for i in range(4)), loop("e", True))
    assert ended.index("eval") < 8 and "train" in ended[len(ended) - 5 :], "neither waits for the other's last turn"


async def test_without_adaptive_limits_no_turn_waits_for_capacity() -> None:
    table = Table()
    async with FakeServer(version="1.5", latency_s=0.1) as a, routing(table, adaptive=False) as router:
        table.publish(engine("a", a.url, max_running=2))
        playing = [asyncio.create_task(router(request([i], session=str(i)))) for i in range(40)]
        await eventually(lambda: a._in_flight == 40, "all are there")
        assert router.waiting == 0 and not router.backpressure()
        await asyncio.gather(*playing)


async def test_a_turn_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    table = Table()
    async with FakeServer(version="1.5", latency_s=0.1) as a, routing(table) as router:
        table.publish(engine("a", a.url, max_running=1))
        turns = [asyncio.create_task(router(request([i], session=str(i), group=str(i)))) for i in range(30)]
        await eventually(lambda: router.waiting == 29 and len(a.requests) == 1, "one goes, the others wait")
        assert router.backpressure(), "a new group would only wait with them"
        for turn in turns[:-1]:
            turn.cancel()
        completion = await asyncio.wait_for(turns[-1], 1.0)
        assert completion.ids == next_ids([29], 8) and len(a.requests) == 2
        assert router.inflight.in_flight == 0 and router.waiting == 0 and not router.backpressure()


async def test_a_full_engine_does_not_keep_a_turn_from_an_empty_one() -> None:
    table = Table()
    async with (
        FakeServer(version="1.5", latency_s=0.05) as a,
        FakeServer(version="1.5", latency_s=0.05) as b,
        routing(table) as router,
    ):
        table.publish(engine("a", a.url, max_running=2), engine("b", b.url, max_running=2))
        done = await asyncio.gather(*(router(request([i], session=str(i))) for i in range(4)))
    assert Counter(c.engine for c in done) == {"a": 2, "b": 2}


async def test_with_windows_full_an_evaluation_on_its_own_engine_need_not_wait() -> None:
    table = Table()
    async with (
        FakeServer(version="1.5", latency_s=0.6) as a,
        FakeServer(version="1.5") as b,
        routing(table) as router,
    ):
        table.publish(engine("a", a.url, max_running=1), engine("b", b.url, role="eval"))
        training = [asyncio.create_task(router(request([i], session=str(i)))) for i in range(3)]
        await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(router(request([9], session="e", pinned=True)), 0.5)).engine == "b"
        assert {c.engine for c in await asyncio.gather(*training)} == {"a"}


async def test_evaluations_that_wait_for_engines_of_their_own_do_not_hold_back_training() -> None:
    table = Table()
    async with (
        FakeServer(version="1.5") as a,
        FakeServer(version="1.5", latency_s=0.3) as b,
        routing(table) as router,
    ):
        waits = router._queue._waits
        own = engine("b", b.url, max_running=1, role="eval")
        table.publish(engine("a", a.url, max_running=1), own)
        asked = [
            asyncio.create_task(router(request([i], session=str(i), group=str(i), pinned=True))) for i in range(30)
        ]
        await eventually(lambda: router.waiting == 29, "one goes, the others wait")
        assert not router.backpressure(), "the engine for training is free"
        await asyncio.wait_for(router(request([9], session="t", group="t")), 5.0)
        await eventually(lambda: waits.seconds().get("eval", 0.0) > 0.1, "the wait has a cause of its own")
        assert not waits.seconds().get("window")
        table.publish(engine("a", a.url, max_running=1), own.model_copy(update={"role": "rollout"}))
        assert router.backpressure(), "on an engine that both use they count"
        for turn in asked:
            turn.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


class Scripted:
    """An engine client without a network: it answers in the next iteration of the loop."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    async def stream(self, request: GenerateRequest, call: EngineCall, *, version: str) -> None:
        async with call:
            await asyncio.sleep(0)
        call.received.take(
            {
                "output_ids": [1],
                "meta_info": {
                    "finish_reason": {"type": "stop"},
                    "weight_version": version,
                    "output_token_logprobs": [[-0.5, 1, None]],
                },
            }
        )


async def operations(engines: int, *, max_running: int) -> float:
    """Operations of Python a turn, when 320 trajectories of 2 turns start at once."""
    table, count = Table(), 0
    router = Router(table, Scripted, WaitTimer(), max_lag=2, limits=TurnLimits())
    table.publish(*(engine(f"e{i}", max_running=max_running) for i in range(engines)))
    await router(request([1], session="first"))  # builds the index

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    async def trajectory(number: int) -> None:
        for turn in range(2):
            await router(request([1] * turn, session=str(number), group=str(number // 8)))

    asked = [asyncio.create_task(trajectory(i)) for i in range(320)]
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts none before a frame has asked for them
    sys.settrace(trace)
    try:
        await asyncio.gather(*asked)
    finally:
        sys.settrace(before)
    assert router.inflight.in_flight == router.waiting == 0
    return count / (2 * len(asked))


@pytest.mark.slow
@pytest.mark.parametrize("trajectories_wait", [False, True])
async def test_a_turn_at_256_engines_costs_at_most_twice_that_at_8(trajectories_wait: bool) -> None:
    few, many = [await operations(n, max_running=256 // n if trajectories_wait else 512) for n in (8, 256)]
    assert many <= 2 * few, f"{few:.0f} operations at 8 engines, {many:.0f} at 256"


def choose_among_all(router: Router, asked: GenerateRequest, failures: dict[str, int], *, returning: bool) -> str:
    """The choice by looking at every engine; "" if none has capacity."""
    usual = [router._engine_of.get(name, "") for name in (f"s:{asked.session}", f"g:{asked.group}")]
    own = "" if failures.get(usual[0]) else usual[0]
    found = [
        Candidate(e.id, router.inflight.load(e), e.running + e.waiting, failures.get(e.id, 0), router.inflight.pace(e))
        for e in router.candidates(pinned=asked.pinned)
        if (e.id == own or not returning) and router.inflight.has_capacity(e, returning=e.id == own)
    ]
    return pick_engine(found, usual, Work(len(asked.ids), router.inflight.turn_tokens)) if found else ""


async def test_the_index_gives_the_choice_and_the_candidates_of_a_look_at_every_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, table, now = random.Random(5), Table(), time.monotonic()
    clock = [now]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    router = Router(table, Scripted, WaitTimer(), max_lag=2, limits=TurnLimits())
    router.health = EngineHealth(lambda: clock[0])
    taken: list[tuple[EngineInfo, GenerateRequest]] = []
    chosen = Counter[str]()

    def publish() -> None:
        states = (NodeState.READY,) * 6 + (NodeState.LOADING,)
        every = [
            engine(
                f"e{i}",
                version=PolicyVersion(1, draw.randint(2, 5)),
                state=draw.choice(states),
                incarnation=str(draw.random() < 0.2),
                running=draw.randint(0, 8),
                waiting=draw.randint(0, 2),
                max_running=draw.choice((2, 4, 8)),
                role="eval" if i == 0 and draw.random() < 0.5 else "rollout",
            )
            for i in range(12)
        ]
        table.publish(*draw.sample(every, 10))

    def expected(pinned: bool) -> list[str]:
        state = table.table
        every = (
            state.pinned("", table.pin)
            if pinned
            else [e for e in state.engines.values() if state.routable(e, max_lag=2)]
        )
        return [e.id for e in every if router.health.usable(incarnation_key(e))]

    publish()
    for step in range(6000):
        what = draw.random()
        if what < 0.45 and len(taken) < 60:
            asked = request([1] * draw.randint(1, 50), session=str(step % 40), group=str(step % 7))
            asked = dataclasses.replace(asked, pinned=draw.random() < 0.3)
            failures = {f"e{draw.randrange(12)}": draw.randint(1, 3) for _ in range(draw.choice((0, 0, 0, 1, 3, 11)))}
            returning = draw.random() < 0.2
            best = choose_among_all(router, asked, failures, returning=returning)
            found = router._try_acquire(asked, failures, returning=returning)
            assert (found.id if found else "") == best
            chosen[best] += 1
            taken += [(found, asked)] if found else []
        elif what < 0.9 and taken:
            router._release(*taken.pop(draw.randrange(len(taken))))
        elif what < 0.92:
            publish()
        elif what < 0.94:
            table.pin = draw.choice((None, PolicyVersion(1, 4), PolicyVersion(1, 5)))
        elif what < 0.97 and taken:
            turn, (at, asked) = TurnAssembler(asked), draw.choice(taken)
            error = EngineError(draw.choice(("unreachable", "http_500")), at.id)
            router._account(at, turn, ReceivedTokens(at.id, 1), error)
        else:
            clock[0] += draw.choice((0.1, 1.0, 10.0))
        for pinned in (False, True):
            assert [e.id for e in router.candidates(pinned=pinned)] == expected(pinned)
    assert len(chosen) == 13 and chosen[""] > 50, chosen


@pytest.mark.fault(6, 20)
def test_strikes_decay_and_three_in_a_row_eject() -> None:
    now = [0.0]
    health = EngineHealth(lambda: now[0])
    for _ in range(2):
        health.strike("a")
    assert health.usable("a") and health.strikes("a") == 2.0
    now[0] = 60.0
    assert health.strikes("a") == pytest.approx(0.5)
    health.strike("a")
    assert health.usable("a"), "old strikes count less"
    health.strike("a")
    assert health.strikes("a") == pytest.approx(2.5) and LIMIT == 2.5 and health.usable("a")
    health.strike("a")
    assert not health.usable("a") and health.usable("b")
    now[0] += EJECTION_S
    assert health.usable("a")


@pytest.mark.fault(5)
def test_an_unreachable_engine_is_tried_again_later_and_later_until_it_answers() -> None:
    now = [0.0]
    health = EngineHealth(lambda: now[0])
    rests = []
    for _ in range(4):
        for _ in range(10):
            health.unreachable("a")  # ten requests meet the same death
        began = now[0]
        while not health.usable("a"):
            now[0] += 0.25
        rests.append(now[0] - began)
    assert rests == [0.5, 1.0, 2.0, 4.0]
    health.succeeded("a")
    health.unreachable("a")
    now[0] += 0.5
    assert health.usable("a")
    for _ in range(1100):  # three hours at the longest rest: 2**1024 is no float
        health.unreachable("a")
        assert not health.usable("a")
        now[0] += LONGEST_RETRY_S


@pytest.mark.fault(5)
async def test_an_engine_that_was_unreachable_for_hours_takes_no_turn_from_the_others() -> None:
    table = Table()
    async with FakeServer() as gone:
        refused = gone.url  # its port is closed now: the connection is refused
    async with FakeServer(version="1.5") as b, routing(table) as router:
        table.publish(engine("a", refused), engine("b", b.url))
        router.health.unreachable("a/")
        record = router.health._records["a/"]
        record.unreachable, record.ejected_until = 1100, 0.0
        completions = await asyncio.gather(*(play(router, "x" * i, 1) for i in range(1, 11)))
        assert completions == [expected("x" * i, 1) for i in range(1, 11)]
        assert record.unreachable == 1101 and not router.health.usable("a/")
