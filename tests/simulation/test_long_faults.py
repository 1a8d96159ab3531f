"""Faults of hours in virtual time: the real loops, thousands of failures in a row, no sleep replaced.

An exponential back-off without a bound overflows a float at 1,024 failures in a row.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from sim import install
from sim.clock import Clock, Process
from sim.install import installed
from sim.knobs import Knobs
from sim.loop import VirtualLoop
from sim.network import AsyncClient, Network, Trouble
from sim.processes import URL
from sim.sim_redis import SimRedis
from sim.world import play

from protocol.codec import encode
from protocol.keys import Keys
from protocol.messages import EngineInfo, NodeState, Sampling, WeightUpdate
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis.aio import RedisClient
from rollout_server.dispatch.fleet import Fleet
from rollout_server.engine.base import EngineError, GenerateRequest
from rollout_server.engine.client import EngineCall
from rollout_server.engine.health import EngineHealth
from rollout_server.engine.router import Router, TurnLimits

AWAY_S = 45 * 60.0
IN_A_ROW = 2000
HOURS, EVERY_S = 3.0, 3.4
"""Duration, and seconds between two turns: one in three tries the engine that cannot be reached."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.fault(58)
def test_a_redis_that_is_away_for_45_minutes_is_waited_for_by_every_loop() -> None:
    knobs = Knobs(steps=40, away_s=AWAY_S, storm_s=AWAY_S + 10, trouble=Trouble(hangs=0.0))
    with installed():
        result = play(1, knobs)
    assert not result.problem, f"{result.problem}\n" + "\n".join(result.lines[-40:])
    assert result.virtual_s > AWAY_S and result.endings == {"done": 1}, "the same learner has ended the run"
    learner = next(count for name, count in result.refused.items() if name.startswith("L"))
    assert learner > IN_A_ROW, result.refused
    assert len(result.refused) == 3 and min(result.refused.values()) > IN_A_ROW / 2, result.refused


class Turns(Process):
    """A rollout server's fleet and router on a virtual event loop, and two engines whose nodes report READY: `a` cannot
    be reached from here, `b` answers. It is the engines' client, too.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__("R1")
        self.clock, self.loop, self.keys = clock, VirtualLoop(clock, self), Keys("sim")
        self.redis = SimRedis(lambda: 1.6e12 + clock.now * 1000)
        self.network = Network(clock, self.redis, Trouble())
        self.ended: Counter[str] = Counter()
        self.refused = 0
        update = WeightUpdate(run="sim", epoch=1, step=5, digest="d", path="p")
        self.redis.hset(self.keys.target, mapping={"b": encode(update), "state": "training"})
        self.main = self.loop.create_task(self._live())
        clock.movers.append(self.loop)

    def async_client(self) -> AsyncClient:
        """Replace protocol.runtime.redis.aio.connect_async (install.py)."""
        return AsyncClient(self.network, self)

    def heartbeat(self) -> None:
        """Renew both registrations, as nodes do that reach Redis."""
        now = self.redis.now_ms() / 1000
        for name in ("a", "b"):
            info = EngineInfo(id=name, url=f"http://{name}", state=NodeState.READY, epoch=1, step=5, incarnation="1")
            self.redis.hset(self.keys.engine(name), mapping={"b": encode(info)})
            self.redis.zadd(self.keys.engines, {name: now + 60})
        self.clock.at(self.clock.now + 20, self.heartbeat)

    async def stream(self, request: GenerateRequest, call: EngineCall, *, version: str) -> None:
        """Answer a request, or fail."""
        if call.received.engine == "a":
            self.refused += 1
            raise EngineError("unreachable", "a", "No route to host")
        meta = {"finish_reason": {"type": "stop", "matched": 7}, "weight_version": "1.5"}
        meta["output_token_logprobs"] = [[-0.5, 3, None], [-0.5, 7, None]]  # type: ignore[assignment]
        call.received.take({"output_ids": [3, 7], "meta_info": meta})

    async def _live(self) -> None:
        fleet = Fleet(RedisClient(URL, self.keys), WaitTimer(), poll_s=10.0)
        following = asyncio.ensure_future(fleet.follow())
        router = Router(fleet, lambda _: self, WaitTimer(), max_lag=2, limits=TurnLimits(wait_s=60.0), vocab_size=100)
        router.health = EngineHealth(clock=self.loop.time)  # its default was bound before `time` was replaced
        await asyncio.sleep(1)
        for turn in range(int(HOURS * 3600 / EVERY_S)):
            name, sampling = str(turn), Sampling()
            request = GenerateRequest(ids=[1], session=name, group=name, max_new_tokens=8, sampling=sampling)
            try:
                self.ended[(await router(request)).finish_reason] += 1
            except (EngineError, ArithmeticError) as error:
                self.ended[repr(error)] += 1
            await asyncio.sleep(EVERY_S)
        following.cancel()


@pytest.mark.fault(59)
def test_an_engine_unreachable_for_hours_fails_no_turn_while_another_is_healthy() -> None:
    clock = Clock(1)
    clock.most_moves = 10**6
    for module in (install.TIME, install.THREADING, install.RANDOM):
        module.clock = clock
    with installed():
        install.world = server = Turns(clock)
        server.heartbeat()
        clock.run(server.main.done, HOURS * 3600 + 600)
        server.main.result()
        server.loop.close()
    assert server.refused > 1024, "it was tried again and again"
    assert set(server.ended) == {"stop"} and server.ended["stop"] > server.refused, server.ended
