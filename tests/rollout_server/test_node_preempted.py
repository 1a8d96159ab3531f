"""A machine that will be taken away: its engine drains as soon as a file or a metadata server says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from protocol.messages import NodeState
from protocol.runtime.http.body import bounded_session
from rollout_server.node import agent
from rollout_server.node.agent import is_preempted
from tests.rollout_server.test_node import has_state, node
from tests.support.fake_engine import FakeServer
from tests.support.waiting import eventually

MARK = "/computeMetadata/v1/instance/preempted"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "NOTICE_S", 0.1)


async def test_an_engine_drains_on_the_notice_also_while_redis_does_not_answer(own_world, tmp_path: Path) -> None:
    world, notice = own_world, tmp_path / "preempted"
    async with FakeServer() as engine, node(world, engine, tmp_path, preempted=str(notice)):
        await eventually(has_state(world, NodeState.READY), "READY")
        world.process.kill()
        notice.touch()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(world.process.start)
        await eventually(has_state(world, NodeState.DRAINING), "DRAINING", 10)
        world.sync.sadd(world.keys.drain, "e")
        await asyncio.sleep(0.3)
        assert has_state(world, NodeState.DRAINING)(), "it stays until the machine is gone"


async def test_what_metadata_servers_answer() -> None:
    """Google: FALSE, then TRUE. Amazon: 404, then 200 with JSON."""
    answer: list[tuple[int, str]] = [(404, "")]

    async def say(request: web.Request) -> web.Response:
        assert request.headers["Metadata-Flavor"] == "Google"
        return web.Response(status=answer[0][0], text=answer[0][1])

    app = web.Application()
    app.router.add_get(MARK, say)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (host, port) = runner.addresses[0][:2]
    try:
        async with bounded_session() as session:
            for said, wanted in (
                ((404, ""), False),
                ((500, "TRUE"), False),
                ((200, "FALSE\n"), False),
                ((200, ""), False),
                ((200, "TRUE"), True),
                ((200, '{"action": "terminate", "time": "2026-11-27T12:00:00Z"}'), True),
            ):
                answer[0] = said
                assert await is_preempted(f"http://{host}:{port}{MARK}", session) == wanted, said
    finally:
        await runner.cleanup()
    async with aiohttp.ClientSession() as session:
        assert not await is_preempted(f"http://{host}:{port}{MARK}", session), "no server"
        assert not await is_preempted("", session)
