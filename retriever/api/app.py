"""The HTTP application: the dialects' routes, `GET /passages/{id}`, and the operators' endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from protocol.runtime.http.auth import Access, Role, Verdict
from protocol.runtime.http.server import SERVER_OPTIONS, auth_middleware
from protocol.search import MAX_QUERY_CHARS, MAX_TOPK
from retriever.api import base, flashrag, openai, search_r1
from retriever.api.base import NOT_OPEN, SERVICE, ApiError, RetrieverState, api_error
from retriever.api.openapi import openapi
from retriever.backends.base import Backend
from retriever.backends.index import document_json
from retriever.backends.web.provider import WebSearchError

_CLIENT_GONE = 499
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Shape = Callable[[ApiError], dict[str, Any]]


ROUTE_ROLES: Mapping[str, Role] = {
    "/metrics": "viewer",
    "/info": "viewer",
    "/openapi.json": "viewer",
    "/v1/models": "viewer",
}
"""Routes that report the service's state. All others return passages, use compute or cost money: role node."""


def create_app(service: RetrieverState, access: Access = Access()) -> web.Application:  # noqa: B008 (immutable)
    """Build the aiohttp application. Run it with `handler_cancellation=True`: abandoned requests are dropped."""
    auth = auth_middleware(access, ROUTE_ROLES, default="node", refuse=_unauthorized)
    app = web.Application(
        middlewares=[auth, _errors_as_json], client_max_size=base.MAX_BODY_BYTES, handler_args=SERVER_OPTIONS
    )
    app[SERVICE] = service
    post, get, metrics = app.router.add_post, app.router.add_get, service.metrics
    post("/retrieve", _counted(metrics, "/retrieve", search_r1.retrieve))
    post("/search", _counted(metrics, "/search", flashrag.search, _fastapi_shape))
    post("/batch_search", _counted(metrics, "/batch_search", flashrag.batch_search, _fastapi_shape))
    post("/v1/embeddings", _counted(metrics, "/v1/embeddings", openai.embeddings, _openai_shape))
    get("/v1/models", _counted(metrics, "/v1/models", openai.models, _openai_shape))
    passages = _counted(metrics, "/passages", _passage)
    get("/passages", passages)
    get("/passages/{id:.+}", passages)
    get("/info", _counted(metrics, "/info", _info))
    get("/openapi.json", openapi)
    get("/health", _health)
    get("/ready", _ready)
    get("/metrics", _metrics)
    return app


def _unauthorized(request: web.Request, verdict: Verdict) -> web.Response:
    code = "unsupported_media_type" if verdict.status == 415 else "unauthorized"
    error = {"message": verdict.message, "type": "invalid_request_error", "param": None, "code": code}
    openai = request.path.startswith("/v1/")
    return web.json_response({"error": error if openai else verdict.message}, status=verdict.status)


def _default_shape(error: ApiError) -> dict[str, Any]:
    return {"error": error.message} | ({"cause": error.cause} if error.cause else {})


def _fastapi_shape(error: ApiError) -> dict[str, Any]:
    return _default_shape(error) | {"detail": error.message}


def _openai_shape(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 429 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.cause or None}}


def _counted(metrics: Any, route: str, handler: Handler, shape: Shape = _default_shape) -> Handler:
    """Wrap a handler: errors become responses in the dialect's shape, and every response is counted."""

    async def counted(request: web.Request) -> web.StreamResponse:
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            return web.json_response(shape(error), status=status, headers=error.headers())
        except web.HTTPException as error:
            status = error.status
            return web.json_response(shape(ApiError(status, error.reason)), status=status)
        except asyncio.CancelledError:
            status = _CLIENT_GONE
            raise
        finally:
            metrics.request(route, status)

    return counted


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors outside any handler (unknown paths, other methods) as JSON."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)


async def _passage(request: web.Request) -> web.Response:
    """Return a passage by path (with plain or escaped slashes) or by `?id=`."""
    backend = _open_backend(request)
    wanted = request.match_info.get("id") or request.query.get("id")
    if not wanted:
        raise ApiError(400, "missing passage id: use GET /passages/ID or /passages?id=ID")
    try:
        passage = await backend.find(wanted)
    except WebSearchError as failure:
        raise api_error(failure.failure) from None
    if passage is None:
        raise ApiError(404, "there is no passage with this id")
    return web.Response(body=document_json(passage), content_type="application/json")


async def _health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    retrievers = {"total": 1, "available": int(service.ready)}  # read by ReSearch's clients
    return web.json_response({"status": "healthy", "ready": service.ready, "retrievers": retrievers})


async def _ready(request: web.Request) -> web.Response:
    if not request.app[SERVICE].ready:
        return web.json_response({"error": NOT_OPEN}, status=503, headers={"Retry-After": "1"})
    return web.json_response({"status": "ready"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[SERVICE].metrics.render(), content_type="text/plain", charset="utf-8")


async def _info(request: web.Request) -> web.Response:
    settings = request.app[SERVICE].settings
    service = {
        "backend": "index" if settings.online is None else "online",
        "topk": settings.topk,
        "max_topk": MAX_TOPK,
        "max_hits": base.MAX_HITS,
        "max_query_chars": MAX_QUERY_CHARS,
    }
    return web.json_response({**_open_backend(request).info(), **service})


def _open_backend(request: web.Request) -> Backend:
    backend = request.app[SERVICE].backend
    if backend is None:
        raise ApiError(503, NOT_OPEN, retry_after_s=1)
    return backend
