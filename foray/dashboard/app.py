"""The HTTP server of the dashboard: access, security headers, static files, JSON, events.

The static files contain no data of the run, so that a browser can load them before it has the token; everything else
needs the role viewer if there are tokens (`protocol/runtime/http/auth.py`). `POST` is for operators: it drains an
engine, or asks a served policy. All other routes read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from foray.dashboard.chat import ChatProxy
from foray.dashboard.conversation import GroupView
from foray.dashboard.events import EventFeed
from foray.dashboard.files import read_logs, read_settings
from foray.dashboard.live import LiveProxy
from foray.dashboard.openapi import ROUTES, describe
from foray.dashboard.source import RunData
from foray.watch.page import render_template
from protocol.errors import ForayError, UserError
from protocol.runtime.http.auth import Access, RequestHead, check_request, decide
from protocol.runtime.http.openapi import serve_document
from protocol.runtime.http.server import SERVER_OPTIONS

log = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")
TYPES: Mapping[str, str] = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
"""Files with other endings (licences, hashes) are not served."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
EXPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Set on every answer that does not set them itself."""
WATCHED_S = 60.0
"""Time after the last request for which the index keeps up with the journal."""
INDEX_S = 2.0
MOST_NAMES = 100

DATA = web.AppKey("data", RunData)
FEED = web.AppKey("feed", EventFeed)
TOUCHED = web.AppKey("touched", list[float])


def build_app(data: RunData, access: Access, chat: ChatProxy | None = None) -> web.Application:
    """Return the aiohttp application."""
    files = _static_files()
    app = web.Application(middlewares=[_guard(access, frozenset(files)), _errors], handler_args=SERVER_OPTIONS)
    app[DATA], app[FEED], app[TOUCHED] = data, EventFeed(data), [time.monotonic()]
    app.on_response_prepare.append(_secure)
    live = LiveProxy(lambda: data.urls("rollout"), access.headers("viewer"))
    chat = chat or ChatProxy()
    app.cleanup_ctx.extend((_background, live.lifetime, chat.lifetime))
    handlers: dict[str, Handler] = {
        "/health": _health,
        "/ready": _health,
        "/openapi.json": serve_document(describe),
        "/events": _events,
        "/api/overview": _reads(lambda data, request: data.overview() | {"operator": _is_operator(request, access)}),
        "/api/diagnosis": _reads(lambda data, request: data.diagnosis()),
        "/api/steps": _reads(lambda data, request: data.curves(_names(request))),
        "/api/staleness": _reads(lambda data, request: data.ages()),
        "/api/facets": _reads(lambda data, request: data.facets()),
        "/api/trajectories": _reads(lambda data, request: data.page(dict(request.query))),
        "/api/groups/{seq}": _reads(lambda data, request: data.group_page(_seq(request), _epoch(request))),
        "/api/groups/{seq}/{place}/tokens": _reads(_tokens),
        "/api/letters": _reads(lambda data, request: data.letters()),
        "/api/evaluations": _reads(lambda data, request: data.evaluations()),
        "/api/logs": _reads(lambda data, request: read_logs(data.directory, request.query.get("name", ""))),
        "/api/settings": _reads(lambda data, request: read_settings(data.directory)),
        "/api/retrievers": _reads(lambda data, request: {"retrievers": data.retrievers()}),
        "/api/live": live.listing,
        "/api/live/{server}/{seq}/{place}": partial(_watch, live),
        "/api/chat/models": chat.models,
        "/api/chat": chat.answer,
        "/api/engines/{engine}/drain": _reads(lambda data, request: data.drain(request.match_info["engine"])),
        "/export/groups/{seq}": _export,
        "/export/groups/{seq}/{place}": _export,
    }
    for path, route in ROUTES.items():
        app.router.add_route(route.method, path, handlers[path])
    for path, handler in files.items():
        app.router.add_get(path, handler)
    return app


def _guard(access: Access, files: frozenset[str]) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        head = RequestHead(request.path, request.headers)
        if request.path in files:
            verdict = check_request(head, is_open=access.open)
        else:
            reads = request.method in ("GET", "HEAD")
            verdict = decide(head, needs="viewer" if reads else "operator", access=access)
        if verdict.status:
            return web.json_response({"error": verdict.message}, status=verdict.status)
        return await handler(request)

    return guard


def _is_operator(request: web.Request, access: Access) -> bool:
    return access.open or access.role_of(request.headers.get("Authorization", "")) == "operator"


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into JSON, without traces of the program."""
    request.app[TOUCHED][0] = time.monotonic()
    try:
        return await handler(request)
    except UserError as error:
        return web.json_response({"error": error.what, "why": error.why, "todo": error.todo}, status=400)
    except ForayError as error:
        return web.json_response({"error": str(error)}, status=503)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)


async def _secure(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


async def _background(app: web.Application) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(app[FEED].run()), asyncio.create_task(_follow(app))]
    yield
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _follow(app: web.Application) -> None:
    """Keep the index up to date while someone looks."""
    while True:
        more = False
        if app[FEED].listened or time.monotonic() - app[TOUCHED][0] < WATCHED_S:
            try:
                more = await asyncio.to_thread(app[DATA].index.update)
            except Exception:
                log.exception("cannot read the journal")
        await asyncio.sleep(0.0 if more else INDEX_S)


def _static_files() -> dict[str, Handler]:
    """Return URL path -> handler of each static file; they are read once."""
    found: dict[str, Handler] = {}
    for path in sorted(STATIC.rglob("*")):
        if path.suffix in TYPES and path.is_file():
            found[f"/{path.relative_to(STATIC).as_posix()}"] = _file(path.read_bytes(), TYPES[path.suffix])
    return found | {"/": found["/index.html"]}


def _file(body: bytes, kind: str) -> Handler:
    tag = hashlib.sha256(body).hexdigest()[:32]

    async def serve(request: web.Request) -> web.Response:
        headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
        if any(etag.value == tag for etag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    return serve


def _reads(read: Callable[[RunData, web.Request], Any]) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        found = await asyncio.to_thread(read, request.app[DATA], request)
        return web.json_response(found)

    return handler


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _events(request: web.Request) -> web.StreamResponse:
    return await request.app[FEED].serve(request)


async def _watch(live: LiveProxy, request: web.Request) -> web.StreamResponse:
    server, seq, place = (_whole(request.match_info[name], name) for name in ("server", "seq", "place"))
    return await live.watch(request, server, seq, place)


def _tokens(data: RunData, request: web.Request) -> dict[str, Any]:
    view = data.group(_seq(request), _epoch(request))
    return data.tokens(view, _place(request, view))


async def _export(request: web.Request) -> web.Response:
    """Answer one HTML file without scripts or references; the template escapes every text."""

    def made() -> tuple[str, str]:
        view = request.app[DATA].group(_seq(request), _epoch(request))
        group, places = view.to_json(), list(range(len(view.group.trajectories)))
        name = f"seq-{view.group.seq}"
        if "place" in request.match_info:
            places = [_place(request, view)]
            name += f"-{places[0] + 1}"
        group["trajectories"] = [group["trajectories"][place] for place in places]
        return name, render_template("trajectory.html", group=group, life=view.life(), places=places)

    name, text = await asyncio.to_thread(made)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.html"',
        "Content-Security-Policy": EXPORT_POLICY,
    }
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=headers)


def _names(request: web.Request) -> list[str]:
    names = [name for name in request.query.get("names", "").split(",") if name]
    if not 0 < len(names) <= MOST_NAMES:
        raise UserError(f"`names` must list 1 to {MOST_NAMES} fields", todo="GET /api/overview lists them")
    return names


def _seq(request: web.Request) -> int:
    return _whole(request.match_info["seq"], "seq")


def _place(request: web.Request, view: GroupView) -> int:
    place, size = _whole(request.match_info["place"], "place"), len(view.group.trajectories)
    if place >= size:
        raise UserError(f"the group of seq {view.group.seq} has {size} trajectories")
    return place


def _epoch(request: web.Request) -> int | None:
    given = request.query.get("epoch", "")
    return _whole(given, "epoch") if given else None


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UserError(f"{name} {text[:40]!r} is not a whole number")
    return int(text)
