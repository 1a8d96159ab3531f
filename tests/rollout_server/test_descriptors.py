"""A process without free file descriptors blames neither engines nor retrievers, and starts with as many as it may."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from protocol.messages import EngineInfo, NodeState, Sampling
from protocol.runtime.http.body import bounded_session
from protocol.runtime.metrics import WaitTimer
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet, FleetTable
from rollout_server.engine import router as router_module
from rollout_server.engine.base import EngineError, GenerateRequest
from rollout_server.engine.client import EngineHttp, SglangClient
from rollout_server.engine.router import Router, TurnLimits
from rollout_server.search.client import HttpSearch, HttpSearchSettings
from tests.support.fake_engine import FakeServer, next_ids
from tests.support.fake_search import FakeRetriever
from tests.support.waiting import eventually


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Use up the descriptors of this process while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


@contextlib.asynccontextmanager
async def routing(*servers: FakeServer) -> AsyncIterator[Router]:
    fleet = Fleet(None, WaitTimer(), poll_s=1.0)  # type: ignore[arg-type]
    version = PolicyVersion(1, 5)
    engines = [
        EngineInfo(id=f"e{i}", url=server.url, epoch=1, step=5, state=NodeState.READY)
        for i, server in enumerate(servers)
    ]
    async with bounded_session() as session:
        limits = TurnLimits(attempts=1, wait_s=20.0)
        connect = lambda e: SglangClient(session, e.url, name=e.id)  # noqa: E731
        router = Router(fleet, connect, WaitTimer(), max_lag=0, limits=limits)
        fleet.install(FleetTable({engine.id: engine for engine in engines}, version))
        yield router


async def test_turns_without_a_descriptor_wait_for_one_and_no_engine_is_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "FILES_PAUSE_S", 0.05)
    async with FakeServer(version="1.5") as a, FakeServer(version="1.5") as b, routing(a, b) as router:
        with no_free_descriptor():
            turns = [
                asyncio.create_task(
                    router(GenerateRequest([i, 2], str(i), str(i), max_new_tokens=8, sampling=Sampling()))
                )
                for i in range(12)
            ]
            await eventually(lambda: router.counts["engine_too_many_files"] >= 24, "each has failed twice")
            assert router.health.total == 0 and len(router.candidates(pinned=False)) == 2
        done = await asyncio.wait_for(asyncio.gather(*turns), 20.0)
    assert [c.ids for c in done] == [next_ids([i, 2], 8) for i in range(12)]
    assert {c.engine for c in done} == {"e0", "e1"} and router.health.total == 0


async def test_searches_without_a_descriptor_are_tried_again_and_no_retriever_is_ejected() -> None:
    counts, gauges = Counter[str](), {}
    async with FakeRetriever() as retriever:
        search = HttpSearch(HttpSearchSettings(urls=(retriever.url,)))
        search.report(counts, gauges)
        try:
            with no_free_descriptor():
                asked = [asyncio.create_task(search(f"a{i}")) for i in range(12)]
                await eventually(lambda: counts["search_faults_too_many_files"] >= 24, "each has failed twice")
                assert gauges["retrievers_healthy"]() == 1
            found = await asyncio.wait_for(asyncio.gather(*asked), 20.0)
        finally:
            await search.close()
    assert all(result.passages and not result.error for result in found)
    assert counts["retriever_ejections"] == counts["search_outages"] == 0


async def test_a_control_call_without_a_descriptor_does_not_count_as_unreachable() -> None:
    async with FakeServer(version="1.5") as server, bounded_session() as session:
        with no_free_descriptor(), pytest.raises(EngineError, match="Too many open files") as caught:
            await EngineHttp(session, server.url).control("GET", "/ready")
    assert caught.value.cause == "too_many_files"


START = """
import argparse, resource
from protocol.runtime import net
from protocol.runtime.service_cli import add_config_arguments, run_service
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
net.MOST_FILES = {most}
parser = argparse.ArgumentParser()
add_config_arguments(parser, "x", "y")
run_service(parser, [], lambda args, tree: print(*resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "most", "expected"), [(256, 2048, 65536, 2048), (256, 2048, 1024, 1024), (500, 500, 256, 500)]
)
def test_a_service_starts_with_the_descriptors_that_it_may_have(soft: int, hard: int, most: int, expected: int) -> None:
    script = START.format(soft=soft, hard=hard, most=most)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == [str(expected), str(hard)]
