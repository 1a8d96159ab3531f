"""The router's process of `foray bench rollout_scale`; prints one JSON object.

python -m benchmarks.rollout.scale_router death|steady TOKENIZER_DIR SPEC

loop         consumes       produces                     waits for       unblocked by
LoopGap      the clock      the longest standstill       TICK_S          the clock
heartbeats   the clock      a new engine table           HEARTBEAT_S     the clock
trajectory   its last turn  its next turn                the router      an engine
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.rollout.scale_engines import VERSION
from protocol.codec import decode_as, encode
from protocol.errors import ForayError
from protocol.messages import EngineInfo, NodeState, Sampling
from protocol.runtime.http.body import bounded_session
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.net import allow_many_files
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet, FleetTable
from rollout_server.engine.base import GenerateRequest
from rollout_server.engine.client import SglangClient
from rollout_server.engine.continuation import StopChecker
from rollout_server.engine.router import Router, TurnLimits
from rollout_server.environment.tokenizer import load_tokenizer

TICK_S, HEARTBEAT_S = 0.002, 0.5
STOPS = ("</search>", "</answer>")
TURN, TURNS, SHARED = 64, 4, 8
"""In the steady state: tokens of a turn, turns of a trajectory, trajectories of a group."""
STARTED = PolicyVersion.parse(VERSION)


class LoopGap:
    """The longest time that the event loop stood still: `seconds`, and `cpu_s` of its thread."""

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            at, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.seconds = max(self.seconds, time.perf_counter() - at - TICK_S)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)


@asynccontextmanager
async def measured() -> AsyncIterator[LoopGap]:
    """Measure the standstills of the loop while the block runs."""
    gap = LoopGap()
    task = asyncio.create_task(gap.watch())
    try:
        await asyncio.sleep(5 * TICK_S)
        yield gap
        await asyncio.sleep(5 * TICK_S)
    finally:
        task.cancel()


class Table(Fleet):
    """A fleet whose engines are given, not read from Redis; their registrations are decoded as if they were."""

    def __init__(self) -> None:
        super().__init__(None, WaitTimer(), poll_s=HEARTBEAT_S)  # type: ignore[arg-type]

    def publish(self, bodies: Sequence[bytes]) -> None:
        engines = [decode_as(EngineInfo, body) for body in bodies]
        self.install(FleetTable({engine.id: engine for engine in engines}, STARTED))


def registration(name: str, url: str) -> bytes:
    """Return the body of an engine's registration."""
    assert STARTED is not None
    facts: dict[str, Any] = {"epoch": STARTED.epoch, "step": STARTED.step, "max_running": 8192}
    return encode(EngineInfo(id=name, url=f"{url}/{name}", incarnation="i", state=NodeState.READY, **facts))


@asynccontextmanager
async def routing(folder: Path) -> AsyncIterator[tuple[Table, Router]]:
    """Yield a router with the settings and parts of a rollout server, and its engine table."""
    table, tokenizer = Table(), load_tokenizer(folder)
    async with bounded_session() as session:

        def connect(engine: EngineInfo) -> SglangClient:
            return SglangClient(session, engine.url, name=engine.id)

        router = Router(
            table,
            connect,
            WaitTimer(),
            max_lag=1,
            limits=TurnLimits(timeout_s=600.0, stall_s=120.0),
            stop_checker=StopChecker(tokenizer.decode, tokenizer.eos_ids),
            vocab_size=100_000,
        )
        yield table, router


async def death(folder: Path, spec: dict[str, Any]) -> dict[str, float]:
    """Run the turns at the first engine, which is killed when each has its tokens (`pid` 0: it is not)."""
    async with routing(folder) as (table, router):
        table.publish([registration("first", spec["first"])])

        def request(number: int) -> GenerateRequest:
            prompt = [number % 256] * spec["prompt"]
            most = spec["tokens"] + 4096
            return GenerateRequest(prompt, f"s{number}", f"g{number}", most, Sampling(), stop=STOPS)

        turns = [asyncio.create_task(router(request(number))) for number in range(spec["turns"])]
        while min((router.count_so_far(f"s{n}") or ("", 0))[1] for n in range(spec["turns"])) < spec["tokens"]:
            if any(turn.done() for turn in turns):
                raise ForayError("a turn ended too early")
            await asyncio.sleep(0.05)
        table.publish([registration("first", spec["first"]), registration("second", spec["second"])])
        begun, cpu = time.perf_counter(), time.process_time()
        async with measured() as gap:
            if spec["pid"]:
                os.kill(spec["pid"], signal.SIGKILL)
            done = await asyncio.gather(*turns)
        pieces = 2 if spec["pid"] else 1
        if any(d.ids != done[0].ids or (d.matched, d.pieces) not in ((STOPS[0], 2), (None, 1)) for d in done):
            raise ForayError("a turn did not end at its stop string")
        if any(d.pieces != pieces for d in done):
            raise ForayError(f"turns of {sorted({d.pieces for d in done})} pieces")
        return {
            "gap_s": gap.seconds,
            "gap_cpu_s": gap.cpu_s,
            "seconds": time.perf_counter() - begun,
            "cpu_s": time.process_time() - cpu,
        }


async def steady(folder: Path, spec: dict[str, Any]) -> dict[str, float]:
    """Keep the trajectories running, and measure after each has had its first turn."""
    turns = itertools.count()
    done = 0
    async with routing(folder) as (table, router):
        bodies = [registration(f"e{number}", spec["url"]) for number in range(spec["engines"])]

        async def heartbeats() -> None:
            while True:
                table.publish(bodies)
                await asyncio.sleep(HEARTBEAT_S)

        async def trajectory(number: int) -> None:
            nonlocal done
            await asyncio.sleep(number / spec["trajectories"] * spec["turn_s"])  # not all at once
            while True:
                ids, name = [number % 256] * 128, f"{number}-{next(turns)}"
                for _ in range(TURNS):
                    request = GenerateRequest(ids, name, f"g{number // SHARED}", TURN, Sampling(), stop=STOPS)
                    ids = [*ids, *(await router(request)).ids]
                    done += 1

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(heartbeats())]
            running += [tasks.create_task(trajectory(number)) for number in range(spec["trajectories"])]
            await asyncio.sleep(1.2 * spec["turn_s"])
            before, begun, cpu = done, time.perf_counter(), time.process_time()
            async with measured() as gap:
                await asyncio.sleep(spec["seconds"])
            seconds, cpu_s, ended = time.perf_counter() - begun, time.process_time() - cpu, done - before
            figures = {
                "cpu_ms_per_turn": 1000 * cpu_s / max(1, ended),
                "gap_s": gap.seconds,
                "gap_cpu_s": gap.cpu_s,
                "turns_per_s": ended / seconds,
                "busy": cpu_s / seconds,
                "in_flight": router.inflight.in_flight,
                "failovers": router.counts["failovers"],
            }
            for task in running:
                task.cancel()
    return figures


if __name__ == "__main__":
    allow_many_files()
    kinds = {"death": death, "steady": steady}
    print(json.dumps(asyncio.run(kinds[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3])))))
