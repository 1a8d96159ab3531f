"""The HTTP face: Search-R1's `POST /retrieve`, `GET /passages/{id}`, and what operators ask for.

Search-R1's own server answers `return_scores: false` wrongly (its loop unpacks a list of documents as if it were a
pair); here all three forms are right. Every error is JSON: {"error": "what happened"}.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from pydantic import ValidationError

from protocol.search import SearchRequest
from retriever.batcher import Batcher, Overloaded, SearchFailed, Stopped
from retriever.cache import Answer
from retriever.config import RetrieverSettings
from retriever.metrics import Metrics
from retriever.searcher import Searcher, document_json

RETRY_AFTER_S = 1
"""What clients are told to wait at 429 and 503."""

_CLIENT_GONE = 499


class Service:
    """What the handlers share. `searcher` and `batcher` are None until the index is open, `draining` ends readiness."""

    def __init__(self, settings: RetrieverSettings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.searcher: Searcher | None = None
        self.batcher: Batcher | None = None
        self.draining = False

    @property
    def ready(self) -> bool:
        """Whether `/retrieve` is answered."""
        return self.batcher is not None and not self.draining


_SERVICE = web.AppKey("service", Service)


def create_app(service: Service) -> web.Application:
    """The aiohttp application. Run it with `handler_cancellation=True`, so that abandoned requests are dropped."""
    app = web.Application(middlewares=[_errors_as_json], client_max_size=int(service.settings.max_body_mb * 2**20))
    app[_SERVICE] = service
    app.router.add_post("/retrieve", _retrieve)
    app.router.add_get("/passages/{id}", _passage)
    app.router.add_get("/health", _health)
    app.router.add_get("/ready", _ready)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/info", _info)
    return app


def render(answers: Sequence[Answer], *, scores: bool) -> bytes:
    """Body of the answer to `/retrieve`, put together from documents that are JSON already."""
    if scores:
        lists = (
            b",".join(
                b'{"document":%b,"score":%b}' % (document, repr(score).encode())
                for document, score in zip(answer.documents, answer.scores, strict=True)
            )
            for answer in answers
        )
    else:
        lists = (b",".join(answer.documents) for answer in answers)
    return b'{"result":[%b]}' % b",".join(b"[%b]" % hits for hits in lists)


async def _retrieve(request: web.Request) -> web.Response:
    service, start, status = request.app[_SERVICE], time.perf_counter(), 500
    try:
        response = await _answer(service, request)
        status = response.status
        return response
    except web.HTTPException as error:
        status = error.status
        raise
    except asyncio.CancelledError:
        status = _CLIENT_GONE
        raise
    finally:
        service.metrics.requests.labels(str(status)).inc()
        service.metrics.request_seconds.observe(time.perf_counter() - start)


async def _answer(service: Service, request: web.Request) -> web.Response:
    raw = await request.read()
    try:
        body = SearchRequest.model_validate_json(raw)
    except ValidationError as error:
        return _error(400, _explain(error))
    if service.batcher is None or service.draining:
        return _error(503, "the index is not open", retry=True)
    try:
        answers = await service.batcher.search(body.queries, body.topk or service.settings.topk)
    except Overloaded as error:
        service.metrics.rejected.inc()
        return _error(429, str(error), retry=True)
    except Stopped as error:
        return _error(503, str(error), retry=True)
    except SearchFailed as error:
        return _error(500, str(error))
    return web.Response(body=render(answers, scores=body.return_scores), content_type="application/json")


def _explain(error: ValidationError) -> str:
    """The first fault in words; a body with thousands of bad queries needs no longer answer."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _error(status: int, message: str, *, retry: bool = False) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}
    return web.json_response({"error": message}, status=status, headers=headers)


async def _passage(request: web.Request) -> web.Response:
    searcher = request.app[_SERVICE].searcher
    if searcher is None:
        return _error(503, "the index is not open", retry=True)
    passage = searcher.find(request.match_info["id"])
    if passage is None:
        return _error(404, "no passage has this id")
    return web.Response(body=document_json(passage), content_type="application/json")


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "healthy", "ready": request.app[_SERVICE].ready})


async def _ready(request: web.Request) -> web.Response:
    if not request.app[_SERVICE].ready:
        return _error(503, "the index is not open", retry=True)
    return web.json_response({"status": "ready"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[_SERVICE].metrics.render(), content_type="text/plain", charset="utf-8")


async def _info(request: web.Request) -> web.Response:
    service = request.app[_SERVICE]
    if service.searcher is None:
        return _error(503, "the index is not open", retry=True)
    return web.json_response({**service.searcher.info(), "topk": service.settings.topk}, dumps=json.dumps)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(error.status, error.reason)
