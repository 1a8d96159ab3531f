"""A whole rollout server, in this process or in one of its own, and an engine that answers it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from rollout_server.config import RolloutSettings
from rollout_server.server import serve
from tests.support.fake_engine import FakeServer, unsaid
from tests.support.fake_search import canned_retriever

FOUND = '"b"\nd e f'
"""What every search brings."""


def talker(tokens, *, turns: int = 1, latency_s: float = 0.0, pace_s: float = 0.0, version: str = "1.5") -> FakeServer:
    """An engine that searches `turns` times and then answers c."""
    search, answer = tokens.encode_trusted("<search> a b </search>"), tokens.encode_trusted("<answer> c </answer>")
    mark = tokens.encode_trusted("</information>")[0]

    def say(body: dict[str, Any]) -> Sequence[int]:
        ids = body["input_ids"]
        return unsaid(search if ids.count(mark) < turns else answer, ids)

    return FakeServer(say, version=version, latency_s=latency_s, pace_s=pace_s)


async def life(
    world,
    model: Path,
    stop: ShutdownSignal,
    *,
    url: str = "",
    name: str = "r",
    port_file: Path | None = None,
    **settings: Any,
) -> None:
    """A rollout server from its beginning to its end."""
    run = RunSettings(id=world.keys.run, dir=model.parent, redis_url=url or world.url, model=model, max_lag=2)
    given: dict[str, Any] = {"id": name, "fleet_poll_s": 0.05, "episode": {"template": "demo", "max_turns": 4}}
    async with canned_retriever(FOUND) as retriever:
        given["search"] = {"type": "http", "urls": retriever.url}
        await serve(run, RolloutSettings.model_validate(given | settings), port_file=port_file, stop=stop)


@contextlib.asynccontextmanager
async def server(
    world, model: Path, *, url: str = "", name: str = "r", **settings: Any
) -> AsyncIterator[tuple[str, ShutdownSignal]]:
    """A rollout server in this process: (base URL, its stop)."""
    port_file, stop = model.parent / f"port-{name}", ShutdownSignal()
    port_file.unlink(missing_ok=True)
    serving = asyncio.create_task(life(world, model, stop, url=url, name=name, port_file=port_file, **settings))
    try:
        while not port_file.exists():
            assert not serving.done(), await serving
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}", stop
    finally:
        stop.requested.set()
        stop.forced.set()
        await asyncio.wait_for(serving, 15)


def spawn(argv: list[str], cwd: Path, **env: str) -> subprocess.Popen[bytes]:
    given = {k: v for k, v in os.environ.items() if k != "FORAY_REDIS_URL"} | env
    return subprocess.Popen([sys.executable, "-m", "rollout_server", *argv], stderr=subprocess.PIPE, cwd=cwd, env=given)
