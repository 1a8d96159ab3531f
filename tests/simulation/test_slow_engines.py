"""Engines of every speed in virtual time: the node's watchdog and the limits of a turn tell slow from dead."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sim.clock import Clock, Process
from sim.loop import VirtualLoop

from protocol.messages import EngineInfo, NodeState
from rollout_server.engine.base import EngineError
from rollout_server.engine.client import EngineCall
from rollout_server.engine.decoding import ReceivedTokens
from rollout_server.metrics import Stats
from rollout_server.node.config import NodeSettings
from rollout_server.node.status import EngineStatus
from rollout_server.node.watchdog import EngineHung, Watchdog

HOUR_S = 3600.0


class Engine:
    """An engine whose work is a function of time: `done(t)` counts what has been computed after t seconds.

    It answers a probe for a token when something is computed after the probe has come, as one that decodes does.
    """

    def __init__(self, done: Callable[[float], float]) -> None:
        self.done, self.asked = done, 0

    async def scheduler_figures(self, *, timeout_s: float) -> list[float]:
        return [math.floor(self.done(asyncio.get_running_loop().time()))]

    async def health(self, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        until, before = loop.time() + timeout_s, math.floor(self.done(loop.time()))
        while loop.time() < until:
            await asyncio.sleep(0.5)
            if math.floor(self.done(loop.time())) > before:
                return
        raise EngineError("timeout", "e", "no answer")

    async def model_info(self, *, timeout_s: float) -> None: ...


def in_virtual_time(play: Callable[[VirtualLoop], Coroutine[Any, Any, Any]], limit_s: float) -> float:
    """Run `play` to its end, and return the virtual seconds that it took; `limit_s` if it has not ended."""
    clock, process = Clock(1), Process("N")
    clock.most_moves = 10**6
    loop = VirtualLoop(clock, process)
    clock.movers.append(loop)
    task = loop.create_task(play(loop))
    try:
        if clock.run(task.done, limit_s):
            task.result()
        return clock.now
    finally:
        loop.shut()


def watched(done: Callable[[float], float], kind: str, until_s: float, first_s: float = 1.0) -> tuple[float, Watchdog]:
    """Return after how many seconds the engine was found to hang (`until_s`: never), and its watchdog."""
    status = EngineStatus(EngineInfo(id="e", url="http://e", state=NodeState.READY, kind=kind))
    status.transition_to(NodeState.READY)
    made: list[Watchdog] = []

    async def play(_: VirtualLoop) -> None:
        settings = NodeSettings.model_validate({})
        client: Any = Engine(done)
        made.append(Watchdog(client, status, settings, Stats("node", "e"), asyncio.Lock(), first_s))
        with pytest.raises(EngineHung):
            await made[0].watch()

    took = in_virtual_time(play, until_s)
    assert (status.state is NodeState.SUSPECT) == (took < until_s), status.detail
    return took, made[0]


def steps(seconds: float, each: float = 1.0) -> Callable[[float], float]:
    return lambda now: now / seconds * each


def prefill(at: float, seconds: float) -> Callable[[float], float]:
    """Steps of 50 ms, and at `at` one of `seconds`, within which nothing is seen."""
    return lambda now: 20 * (min(now, at) + max(0.0, now - at - seconds))


@pytest.mark.fault(19)
@pytest.mark.parametrize(
    ("kind", "done", "first_s"),
    [
        ("cpu", steps(8.0, each=12), 1.0),
        ("cpu", steps(600.0, each=12), 50.0),
        ("sglang", steps(8.0), 8.0),
        ("sglang", steps(280.0), 1.0),
        ("sglang", steps(900.0), 900.0),
        ("sglang", prefill(60.0, 120.0), 1.0),  # a long prompt on a crowded GPU
        ("sglang", prefill(0.0, 120.0), 1.0),  # the first step
        ("sglang", lambda now: prefill(600.0, 120.0)(now) if now < 1000 else prefill(1000.0, 500.0)(now), 1.0),
    ],
)
def test_an_engine_whose_steps_end_is_never_killed(kind: str, done: Callable[[float], float], first_s: float) -> None:
    took, _ = watched(done, kind, HOUR_S, first_s)
    assert took == pytest.approx(HOUR_S, abs=60)


@pytest.mark.fault(19)
@pytest.mark.parametrize("before", [steps(0.05), steps(8.0, each=12), steps(100.0)])
@pytest.mark.parametrize("kind", ["cpu", "sglang"])
def test_an_engine_without_progress_is_found_within_three_times_the_limit(
    kind: str, before: Callable[[float], float]
) -> None:
    """However it hangs: stopped, blocked, or spinning. Its progress stands still from a moment on."""
    at, first_s = 1200.0, 20.0
    took, watchdog = watched(lambda now: before(min(now, at)), kind, 10 * HOUR_S, first_s)
    assert at < took <= at + 3 * watchdog.limit_s, (took - at, watchdog.limit_s)
    print(f"{kind}: limit {watchdog.limit_s:.0f} s, found after {took - at:.0f} s")


def test_a_turn_at_an_engine_with_steps_of_eight_seconds_is_neither_stalled_nor_late() -> None:
    """150 tokens in chunks of 8 take 20 minutes, with 64 s between two chunks; the limits are 20 and 120 s."""

    async def play(loop: VirtualLoop, pace_s: float) -> None:
        call = EngineCall(ReceivedTokens("e", 150), timeout_s=120.0, stall_s=20.0, pace_s=lambda: pace_s)
        async with call:
            for _ in range(150 // 8):
                await asyncio.sleep(64.0)
                call.on_data()

    assert in_virtual_time(lambda loop: play(loop, 8.0), HOUR_S) == pytest.approx(64 * 18, abs=1)
    with pytest.raises(EngineError, match="stalled"):
        in_virtual_time(lambda loop: play(loop, 0.05), HOUR_S)


def test_a_turn_at_an_engine_whose_node_sees_steps_and_that_sends_nothing_ends() -> None:
    """The limit of a turn grows with the steps, not for ever: a lost request is found."""

    async def play(loop: VirtualLoop) -> None:
        async with EngineCall(ReceivedTokens("e", 150), timeout_s=120.0, stall_s=20.0, pace_s=lambda: 8.0):
            await asyncio.Event().wait()

    with pytest.raises(EngineError, match="not finished within 6000 s"):
        in_virtual_time(play, 5 * HOUR_S)
