"""A process that stood still (a blocked event loop, SIGSTOP, a suspended machine) blames no peer for that; a peer that
is really silent is still found. The peers are servers on real sockets in a loop of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from protocol.runtime.http.body import bounded_session
from rollout_server.engine.client import EngineHttp
from rollout_server.node.config import AttachedEngine
from rollout_server.rewards.custom import Custom, CustomSettings
from rollout_server.search.client import HttpSearch, HttpSearchSettings
from tests.rollout_server.test_failover import Table, ask, info, routing
from tests.rollout_server.test_node_watch import node
from tests.support.elsewhere import block, elsewhere
from tests.support.fake_engine import FakeServer, Fault, next_ids
from tests.support.fake_search import FakeRetriever
from tests.support.fake_search import Fault as SearchFault
from tests.support.waiting import eventually


def all_of(body: dict[str, Any]) -> Sequence[int]:
    return next_ids(body["input_ids"], body["sampling_params"]["max_new_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(("limits", "blocked_s"), [({"stall_s": 1.0}, 1.5), ({"stall_s": 1.5, "timeout_s": 1.5}, 2.0)])
async def test_engines_that_stream_all_the_time_are_not_blamed_for_a_standstill(
    limits: dict[str, float], blocked_s: float
) -> None:
    engines = [FakeServer(all_of, version="1.6", pace_s=0.1) for _ in range(8)]
    with elsewhere(*engines):
        table = Table()
        async with routing(table, interval=1, **limits) as router:
            table.publish(*(info(f"e{i}", engine) for i, engine in enumerate(engines)))
            requests = [ask([i, 2, 3], n=25) for i in range(64)]
            turns = [asyncio.create_task(router(request)) for request in requests]
            await eventually(lambda: min(e.tokens_made for e in engines) >= 8 * 2, "all stream", 20)
            block(blocked_s)
            done = await asyncio.gather(*turns)
            assert [completion.ids for completion in done] == [next_ids(request.ids, 25) for request in requests]
            assert len(router.candidates(pinned=False)) == 8 and router.health.total == 0
            assert router.counts["failovers"] == 0


async def test_an_engine_that_is_silent_during_and_after_a_standstill_is_found() -> None:
    engine = FakeServer(all_of, version="1.6", pace_s=0.05)
    engine.faults["/generate"] = Fault(after=4, hang=True, times=1)
    with elsewhere(engine):
        table = Table()
        async with routing(table, interval=1, stall_s=1.0) as router:
            table.publish(info("a", engine))
            turn = asyncio.create_task(router(ask([1, 2, 3], n=10)))
            await eventually(lambda: engine.tokens_made == 4, "it hangs")
            block(1.5)
            began = time.monotonic()
            assert (await turn).ids == next_ids([1, 2, 3], 10)
            assert router.counts["engine_stalled"] == 1 and time.monotonic() - began < 15


async def test_time_limits_of_control_calls_and_connections_exclude_a_suspension_of_the_process() -> None:
    engine = FakeServer(version="1.6")
    with elsewhere(engine):
        async with bounded_session(connect_s=0.5) as session:
            http = EngineHttp(session, engine.url)
            asyncio.get_running_loop().call_soon(block, 1.0)  # runs when the call waits for its connection
            answer = await http.call("GET", "/model_info", None, timeout_s=0.5, headers={})
            assert answer == {"weight_version": "1.6"}


@pytest.mark.slow
async def test_no_retriever_is_ejected_because_this_process_stood_still() -> None:
    retriever = FakeRetriever(lambda query: SearchFault(after_s=0.3))
    with elsewhere(retriever):
        given = {"urls": (retriever.url,), "deadline_s": 10.0, "attempt_s": 0.8, "probe_s": 0.8, "outage_wait_s": 0.1}
        search = HttpSearch(HttpSearchSettings.model_validate(given))
        try:
            searches = [asyncio.create_task(search(f"q{i}")) for i in range(32)]
            await eventually(lambda: len(retriever.asked) > 0, "it is asked")
            block(1.2)
            assert {result.error for result in await asyncio.gather(*searches)} == {""}
            counts = search.balancer.counts
            assert counts["search_faults_timeout"] == counts["retriever_ejections"] == counts["search_outages"] == 0
            retriever.script = lambda query: SearchFault(hang=True)
            assert (await search("silent")).error, "one that is really silent is found"
            assert counts["search_faults_timeout"] > 0
        finally:
            await search.close()


class SlowToAnswer(FakeServer):
    """Its probe takes a while, as one token of a busy engine does."""

    async def _generates(self, request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return await super()._generates(request)


async def test_a_node_suspended_during_a_probe_does_not_restart_its_engine(
    world: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SlowToAnswer(version="1.0")
    with elsewhere(engine):
        kind = AttachedEngine(url=engine.url)
        async with node(world, tmp_path, kind, probe_s=0.1, probe_timeout_s=1.0, hang_s=1.0, lease_s=30.0):
            probes = engine.calls.count("/health_generate") + 2
            await eventually(lambda: engine.calls.count("/health_generate") >= probes, "a probe has begun")
            block(1.5)
            await eventually(lambda: engine.calls.count("/health_generate") >= probes + 2, "the next probes")
            assert "no sign of life" not in caplog.text and "hung" not in caplog.text


async def slow(outcome: object) -> float:
    await asyncio.sleep(0.1)
    return 1.0


async def test_a_custom_reward_is_not_late_because_of_a_standstill() -> None:
    reward = Custom(CustomSettings(target=f"{__name__}:slow", deadline_s=0.5))
    asyncio.get_running_loop().call_soon(block, 1.0)
    assert await reward(None) == 1.0  # type: ignore[arg-type]
