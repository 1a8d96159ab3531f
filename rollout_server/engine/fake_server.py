"""A scripted engine behind a real socket: the routes of SGLang that we use, with faults on demand. For tests.

What it says is a pure function of what it is given (`next_ids`), so whoever continues a trajectory, this engine or
another, must arrive at the same tokens: a lost or doubled one shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

VOCAB = 1000


def next_ids(ids: Sequence[int], count: int) -> list[int]:
    """`count` ids in [0, VOCAB) that follow from `ids` alone."""
    seen = list(ids)
    for _ in range(count):
        seen.append((31 * sum(seen[-8:]) + 7 * len(seen)) % VOCAB)
    return seen[len(ids) :]


@dataclass
class Fault:
    """What a route does instead: hang for ever, drop the connection, or answer `status` or `body`; -1 times: always."""

    hang: bool = False
    drop: bool = False
    status: int = 0
    body: Any = None
    times: int = -1


Say = Callable[[dict[str, Any]], Sequence[int]]
"""Ids to answer a /generate body with; the turn ends by "stop" when fewer than max_new_tokens."""


def _eight(body: dict[str, Any]) -> Sequence[int]:
    return next_ids(body["input_ids"], min(8, body["sampling_params"]["max_new_tokens"]))


class FakeServer:
    """`async with FakeServer() as engine: engine.url ...`. `calls` holds every route in order, `requests` each body."""

    def __init__(self, say: Say = _eight, *, version: str = "default", latency_s: float = 0.0) -> None:
        self._say, self._latency_s = say, latency_s
        self.version, self.loaded = version, ""
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.faults: dict[str, Fault] = {}
        self.url = ""
        self._running = asyncio.Event()
        self._running.set()
        self._in_flight = 0
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> FakeServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; on the same port when it listened before."""
        app = web.Application(middlewares=[self._faulty], client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health_generate", self._ok)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/flush_cache", self._ok)
        app.router.add_post("/abort_request", self._ok)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Die: the port is closed, and requests in flight lose their connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        fault = self.faults.get(request.path)
        if fault is None or fault.times == 0:
            return await handler(request)  # type: ignore[no-any-return]
        fault.times -= 1
        if fault.hang:
            await asyncio.Event().wait()
        if fault.drop:
            assert request.transport is not None
            request.transport.close()
            await asyncio.Event().wait()
        if fault.status:
            return web.json_response({"error": "scripted"}, status=fault.status)
        return web.json_response(fault.body)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self._in_flight += 1
        try:
            await asyncio.sleep(self._latency_s)
            await self._running.wait()
        finally:
            self._in_flight -= 1
        ids = [int(i) for i in self._say(body)]
        stopped = len(ids) < body["sampling_params"]["max_new_tokens"]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": None} if stopped else {"type": "length", "length": len(ids)},
            "weight_version": self.version,
            "output_token_logprobs": [[-0.25, i, None] for i in ids],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"num_running_reqs": self._in_flight, "num_waiting_reqs": 0, "token_usage": 0.0, "gen_throughput": 0.0}
        return web.json_response({"loads": [load]})

    async def _pause(self, _: web.Request) -> web.Response:
        self._running.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.version, self.loaded = body["weight_version"], body["model_path"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})
