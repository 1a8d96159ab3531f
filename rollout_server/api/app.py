"""The HTTP API of a rollout server: health, status, metrics, and episodes on request.

GET  /health       200 while the event loop runs
GET  /ready        200 when Redis answers and an engine accepts requests (before the learner's first version: when an
                   engine is READY); else 503 with the reasons
GET  /status       JSON: target, engines as this server sees them, work in flight, counters, waits
GET  /metrics      Prometheus
GET  /openapi.json the OpenAPI document of these routes
POST /v1/episodes  see `rollout_server.api.episodes`
GET  /v1/live, /v1/live/trajectory  see `rollout_server.api.live`
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web
from pydantic import ValidationError

from protocol.runtime.http import sse
from protocol.runtime.http.auth import Access, Role
from protocol.runtime.http.server import SERVER_OPTIONS, auth_middleware
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.timing import loop_timeout
from rollout_server.api.episodes import Episodes, EpisodesRequest, EpisodesSummary, FleetUnknown
from rollout_server.api.evaluation_pin import PinLost
from rollout_server.api.live import LiveFeed
from rollout_server.api.openapi import openapi
from rollout_server.dispatch.fleet import Fleet
from rollout_server.engine.admission import incarnation_key
from rollout_server.engine.router import Router
from rollout_server.metrics import Stats, prometheus_text

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""Maximum request body in bytes: enough for ten thousand questions of a few kilobytes each."""
BODY_S = 60.0
"""Timeout for receiving a request body, in seconds."""
READ_S = 60.0
"""Timeout for a streaming client that does not read, in seconds."""
ALIVE_S = 15.0
"""Interval of the comments in a stream, in seconds."""
REDIS_SILENT_S = 5.0
"""The server is not ready when Redis has not answered for this long."""


@dataclass(frozen=True)
class AppState:
    """State shared by the request handlers."""

    run: str
    fleet: Fleet
    router: Router
    stats: Stats
    episodes: Episodes
    live: LiveFeed
    stopping: Callable[[], bool]


OF_ENGINE = {"id", "url", "state", "role", "running", "waiting", "detail"}
"""Fields of a registration that `GET /status` has under the same name."""
STATE = web.AppKey("served", AppState)


ROUTE_ROLES: Mapping[str, Role] = {
    "/status": "viewer",
    "/metrics": "viewer",
    "/openapi.json": "viewer",
    "/v1/episodes": "operator",
    "/v1/live": "viewer",
    "/v1/live/trajectory": "viewer",
}
"""Role required by a route. Episodes use engine time and searches. All other routes require the operator role."""


def build_app(state: AppState, access: Access) -> web.Application:
    """Return the aiohttp application."""
    auth = auth_middleware(access, ROUTE_ROLES, default="operator")
    app = web.Application(middlewares=[auth], client_max_size=MAX_BODY_BYTES, handler_args=SERVER_OPTIONS)
    app[STATE] = state
    app.router.add_get("/health", _health)
    app.router.add_get("/ready", _ready)
    app.router.add_get("/status", _status)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/openapi.json", openapi)
    app.router.add_post("/v1/episodes", _episodes)
    app.router.add_get("/v1/live", _live)
    # a HEAD request would watch a trajectory and get nothing
    app.router.add_get("/v1/live/trajectory", _live_trajectory, allow_head=False)
    return app


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _ready(request: web.Request) -> web.Response:
    state = request.app[STATE]
    reasons = []
    if state.stopping():
        reasons.append("stopping")
    if time.monotonic() - state.fleet.read_at > REDIS_SILENT_S:
        reasons.append("Redis does not answer")
    if not state.router.candidates(pinned=state.fleet.table.target is None):
        reasons.append("no engine accepts requests")
    return web.json_response({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)


async def _status(request: web.Request) -> web.Response:
    state = request.app[STATE]
    table, stats = state.fleet.table, state.stats
    takes = {engine.id for engine in state.router.candidates(pinned=False)}
    engines = [
        {
            **engine.model_dump(include=OF_ENGINE),
            "version": engine.version.label,
            "takes_requests": engine.id in takes,
            "unroutable_reason": state.router.unroutable_reason(engine),
            "strikes": round(state.router.health.strikes(incarnation_key(engine)), 3),
            "trouble": state.router.health.last_error(incarnation_key(engine)),
            "window": state.router.inflight.limit(engine),
            "requests_in_flight": state.router.inflight.requests(engine),
            "tokens_in_flight": state.router.inflight.tokens(engine),
        }
        for engine in sorted(table.engines.values(), key=lambda e: e.id)
    ]
    return web.json_response(
        {
            "run": state.run,
            "id": stats.id,
            "stopping": state.stopping(),
            "target": table.target.label if table.target else None,
            "done": table.done,
            "engines": engines,
            "values": stats.values(),
            "waits": stats.waits.seconds(),
        }
    )


async def _metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    text = prometheus_text(state.stats, state.run)
    return web.Response(body=text, content_type="text/plain", charset="utf-8")


async def _live(request: web.Request) -> web.Response:
    return web.json_response(await request.app[STATE].live.listing())


async def _live_trajectory(request: web.Request) -> web.StreamResponse:
    return await request.app[STATE].live.serve(request)


async def _episodes(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
    try:
        async with loop_timeout(BODY_S):
            raw = await request.read()
        wanted = EpisodesRequest.model_validate_json(raw)
    except TimeoutError:
        return web.json_response({"error": f"the request body did not arrive within {BODY_S:g} s"}, status=408)
    except web.RequestPayloadError:
        return web.json_response({"error": "the request body does not match its headers"}, status=400)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return web.json_response({"error": f"{where}: {first['msg']}".removeprefix(": ")}, status=400)
    try:
        if wanted.stream:
            return await _stream(request, state.episodes, wanted)
        async with aclosing(state.episodes.run(wanted)) as running:
            finished = [episode async for episode in running]
    except (RedisUnavailable, PinLost) as error:
        return web.json_response({"error": f"the version cannot be pinned: {error}"}, status=503)
    except FleetUnknown as error:
        return web.json_response({"error": str(error)}, status=503)
    order = {question.id: i for i, question in enumerate(wanted.questions)}
    finished.sort(key=lambda e: (order[e["question_id"]], e["index"]))
    return web.json_response({"episodes": finished} | EpisodesSummary(finished).values())


async def _stream(request: web.Request, episodes: Episodes, wanted: EpisodesRequest) -> web.StreamResponse:
    """Stream each finished episode as a `data:` line of JSON, then `event: summary`, or `event: error` when the
    pinned version was lost. Disconnect a client that reads nothing for READ_S: its pin would delay training. A comment
    every ALIVE_S tells the client that episodes run, however long one takes.
    """
    summary = EpisodesSummary()
    response = web.StreamResponse(headers=sse.HEADERS)
    one = asyncio.Lock()

    async def send(event: str) -> None:
        async with one:
            if not response.prepared:
                await response.prepare(request)
            await sse.write(request, response, event.encode(), READ_S)

    async def keep_alive() -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            await send(": episodes run\n\n")

    alive = asyncio.create_task(keep_alive())
    try:
        async with aclosing(episodes.run(wanted)) as running:
            async for episode in running:
                summary.add(episode)
                await send(f"data: {json.dumps(episode)}\n\n")
        await send(f"event: summary\ndata: {json.dumps(summary.values())}\n\n")
    except PinLost as error:
        if not response.prepared:
            raise
        await send(f"event: error\ndata: {json.dumps({'error': str(error)})}\n\n")
    finally:
        alive.cancel()
    await sse.end(response)
    return response
