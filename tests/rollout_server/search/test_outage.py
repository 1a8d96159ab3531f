"""A retriever process is killed, hung and started again under a running rollout service with real Redis and sockets.

No trajectory may pay for it: leasing pauses, searches wait, every group is published at its first attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from protocol.messages import Owner, Status, TrajectoryGroup
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.runtime.net import free_port
from protocol.runtime.redis.aio import BLOCK_MS
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.config import RolloutSettings
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, unsaid
from tests.support.messages import make_task
from tests.support.waiting import eventually

V5 = PolicyVersion(1, 5)
BATCH, SIZE = 12, 4
WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


class Retriever:
    """`python -m retriever` over a corpus of eight passages, always at the same port."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        passages = [{"id": f"p-{w}", "contents": f'"{w}"\n{w} {w} {w} b'} for w in WORDS]
        (directory / "corpus.jsonl").write_text("".join(json.dumps(p) + "\n" for p in passages))

    def start(self) -> None:
        given = [f"retriever.port={self.port}", f"retriever.corpus={self.directory / 'corpus.jsonl'}"]
        with (self.directory / "retriever.log").open("ab") as log:
            argv = [sys.executable, "-m", "retriever", *given]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


@pytest.fixture
def retriever(tmp_path: Path) -> Any:
    made = Retriever(tmp_path)
    made.start()
    yield made
    made.kill()


def curious(tokens) -> FakeServer:
    """An engine that searches three times, for words that depend on the trajectory so far, and then answers c."""
    mark, answer = tokens.encode_trusted("</information>")[0], tokens.encode_trusted("<answer> c </answer>")

    def say(body: dict[str, Any]) -> Sequence[int]:
        ids = body["input_ids"]
        turn = ids.count(mark)
        words = [WORDS[(hash(body["rid"]) >> (3 * i)) % 8] for i in range(3)]
        return unsaid(tokens.encode_trusted(f"<search> {' '.join(words)} </search>") if turn < 3 else answer, ids)

    return FakeServer(say, version=V5.label, latency_s=0.15)


@contextlib.asynccontextmanager
async def rollout_server(world, tmp_path: Path, model: Path, retriever: Retriever) -> AsyncIterator[Callable[..., Any]]:
    """A rollout server in this process; yields what asks for its `/status`."""
    run = RunSettings(id=world.keys.run, dir=tmp_path, redis_url=world.url, model=model, max_lag=2)
    search = {"type": "http", "urls": [retriever.url], "topk": 1, "deadline_s": 20.0, "attempt_s": 1.0, "probe_s": 0.3}
    settings = {"id": "r", "fleet_poll_s": 0.05, "concurrency_groups": 64, "task_idle_ms": 60_000, "search": search}
    settings |= {"episode": {"template": "demo", "max_turns": 4}}
    stop, port_file = ShutdownSignal(), tmp_path / "port"
    serving = asyncio.create_task(
        serve(run, RolloutSettings.model_validate(settings), port_file=port_file, stop=stop), name="serve"
    )
    async with aiohttp.ClientSession() as session:

        async def status() -> dict[str, Any]:
            async with session.get(f"http://127.0.0.1:{port_file.read_text().strip()}/status") as response:
                return await response.json()  # type: ignore[no-any-return]

        try:
            while not port_file.exists():
                assert not serving.done(), await serving
                await asyncio.sleep(0.01)
            yield status
        finally:
            stop.requested.set()
            stop.forced.set()
            await asyncio.wait_for(serving, 15)


@pytest.mark.slow
@pytest.mark.fault(36)
async def test_an_outage_of_the_retriever_costs_time_and_no_trajectory(
    world, tmp_path: Path, retriever: Retriever
) -> None:
    model = write_tokenizer(tmp_path / "model", "words")
    world.target(V5)
    async with (
        curious(load_tokenizer(model)) as engine,
        rollout_server(world, tmp_path, model, retriever) as status,
    ):
        world.register("e", engine.url, V5, max_running=256)
        issued = 0

        def issue() -> None:
            """A batch more on the stream."""
            nonlocal issued
            world.issue(*(make_task(issued + i, group_size=SIZE) for i in range(1, BATCH + 1)))
            issued += BATCH

        async def outage(begin: Callable[[], None], end: Callable[[], None]) -> None:
            """Begin it, see that work stands still and nothing fails, end it, and see that work goes on."""
            issue()
            turns = len(engine.requests) + BATCH * SIZE
            await eventually(lambda: len(engine.requests) > turns, "each trajectory has searched", 90)
            begin()
            async with asyncio.timeout(60):
                while not (await status())["values"]["search_breaker"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            # until a read of tasks that was under way has ended, and turns have reached a search
            await asyncio.sleep(BLOCK_MS / 1000 + 0.1)
            issue()
            published, leased, before = len(world.published()), world.pending(), await status()
            await asyncio.sleep(0.5)
            now = await status()
            assert (len(world.published()), world.pending()) == (published, leased), "nothing is leased, nothing ends"
            assert now["waits"]["retriever"] - before["waits"]["retriever"] > 0.4
            assert now["values"]["retrievers_healthy"] == 0 and now["values"]["trajectories_in_flight"] > 0
            assert leased <= issued - BATCH - published and now["values"]["groups_in_flight"] == leased
            end()
            await eventually(lambda: len(world.published()) > published, "work goes on", 90)

        await outage(retriever.kill, retriever.start)
        await outage(lambda: retriever.send(signal.SIGSTOP), lambda: retriever.send(signal.SIGCONT))
        await eventually(lambda: len(world.published()) == issued, "every group ends", 90)
        values = (await status())["values"]

    groups = world.published()
    assert sorted(g.seq for g in groups) == list(range(1, 4 * BATCH + 1)) and world.pending() == 0
    assert all(isinstance(g, TrajectoryGroup) and g.attempt == 1 and len(g.trajectories) == SIZE for g in groups)
    trajectories = [t for g in groups for t in g.trajectories]
    assert {(t.status, t.cause, t.searches) for t in trajectories} == {(Status.ANSWERED, "", 3)}
    seen = [s for t in trajectories for s in t.segments if s.owner is Owner.ENVIRONMENT]
    assert {s.error for s in seen} == {""} and all(s.passage_ids for s in seen)
    # what was asked for, what was found, and what is in the trajectories are one number
    assert values["searches"] == values["search_outcome_found"] == len(seen) == 3 * SIZE * issued
    assert values["search_errors"] == 0 and values["trajectories"] == SIZE * issued
    assert values["search_outages"] >= 2 and values["search_faults_unreachable"] > 0
    assert values["search_faults_timeout"] > 0 and values["search_breaker"] == 0
