"""Shared code of all dialects' handlers: the application's state, errors as JSON, one search as outcomes.

Every error is JSON with at least {"error": "what happened"}; dialects may add the field that their clients read.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from aiohttp import web
from pydantic import BaseModel, ValidationError

from protocol.runtime.timing import loop_timeout
from retriever.backends.base import Backend, Kind, QueryFailure, QueryResult
from retriever.config import RetrieverSettings
from retriever.metrics import Metrics
from retriever.serving.admission import Overloaded
from retriever.serving.batcher import DynamicBatcher, ServiceStopped
from retriever.serving.service import QueryService

NOT_OPEN = "the index is not open"
INTERNAL_CAUSES = frozenset({"index", "rerank", "internal"})
"""Causes of this service (500); all others are a provider's (502)."""

BODY_S = 30.0
"""Timeout for a body, in seconds: a slow body would occupy memory that other requests wait for."""
_SMALL, _BODIES = 1 << 16, 4
"""Bodies up to `_SMALL` bytes are not counted; larger ones share memory for `_BODIES` bodies of the maximum size."""

Body = TypeVar("Body", bound=BaseModel)


class EmbeddingInput(NamedTuple):
    """One text to embed, as a batcher's key."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class EmbeddingService:
    """State of `/v1/embeddings`: the encoder's name, its queue, and the tokenizer of token ids."""

    model: str
    texts: DynamicBatcher[EmbeddingInput, npt.NDArray[np.float32]]
    tokenizer: Any = None


class RetrieverState:
    """State shared by the handlers.

    backend, searches, embedding  None until the back-end is open
    num_passages                  size of the corpus; None until known, and for a web search engine
    draining                      the service is shutting down and no longer ready
    """

    def __init__(self, settings: RetrieverSettings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.backend: Backend | None = None
        self.searches: QueryService | None = None
        self.embedding: EmbeddingService | None = None
        self.num_passages: int | None = None
        self.draining = False
        self._body_bytes = 0

    @asynccontextmanager
    async def body_memory(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve memory for a body while the block runs.

        Raises ApiError 429 (503 with `overload: wait`) if other large bodies fill it.
        """
        if num_bytes <= _SMALL:
            yield
            return
        if self._body_bytes and self._body_bytes + num_bytes > _BODIES * self.settings.max_body_mb * 2**20:
            self.metrics.rejected.inc()
            status = 503 if self.settings.overload == "wait" else 429
            raise ApiError(status, "too many large requests in progress", retry_after_s=1)
        self._body_bytes += num_bytes
        try:
            yield
        finally:
            self._body_bytes -= num_bytes

    @property
    def ready(self) -> bool:
        """Return whether searches are answered."""
        return self.searches is not None and not self.draining


SERVICE = web.AppKey("service", RetrieverState)


class ApiError(Exception):
    """A response other than 200, raised by any part of a handler and rendered by its dialect."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after_s, self.cause = status, message, retry_after_s, cause

    def headers(self) -> dict[str, str]:
        """Return `Retry-After`, if a retry makes sense."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


@asynccontextmanager
async def request_body(kind: type[Body], request: web.Request) -> AsyncIterator[Body]:
    """Read and validate the request's body; its memory is reserved until the block ends, including time in the queue.

    Raises ApiError 400 with the first error only, even for a body with thousands of bad queries. Malformed
    queries are made searchable and counted (`protocol.search.Query`).
    """
    service = request.app[SERVICE]
    size, most = request.content_length, int(service.settings.max_body_mb * 2**20)
    if size is not None and size > most:  # before it takes memory from other requests
        raise web.HTTPRequestEntityTooLarge(most, size)
    # a body of unknown length may reach the maximum
    async with service.body_memory(most if size is None else size):
        try:
            async with loop_timeout(BODY_S):
                raw = await request.read()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        except web.RequestPayloadError:
            raise ApiError(400, "the body does not match its headers") from None
    async with service.body_memory(len(raw)):
        yield _checked(service, kind, raw)


def _checked(service: RetrieverState, kind: type[Body], raw: bytes) -> Body:
    odd = Counter[str]()
    try:
        # not pydantic's parser, which refuses a body for a single lone surrogate
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"Invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body is not a JSON object")
    most = service.settings.max_hits
    for name, value in content.items():  # before each item is validated
        if isinstance(value, list) and len(value) > most:
            raise ApiError(400, f"{name:.64}: {len(value)} items exceed retriever.max_hits = {most}")
    try:
        body = kind.model_validate(content, context=odd)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{where}: {first['msg']}" if where else first["msg"]) from None
    service.metrics.odd(odd)
    return body


def _hits(service: RetrieverState, requested: int) -> int:
    """Return `requested`, or the whole corpus if that is smaller. Raises ApiError 400 beyond `max_topk`."""
    most, passages = service.settings.max_topk, service.num_passages
    if requested <= most:
        return requested
    if passages is not None and passages <= most:
        return max(1, passages)
    raise ApiError(400, f"{requested} hits per query exceed retriever.max_topk = {most}")


async def search_outcomes(service: RetrieverState, queries: Sequence[str], k: int) -> list[QueryResult | QueryFailure]:
    """Return one outcome per query. Raises ApiError 400, 429 and 503."""
    if service.searches is None or service.draining:
        raise ApiError(503, NOT_OPEN, retry_after_s=1)
    k = _hits(service, k)
    if len(queries) * k > service.settings.max_hits:
        raise ApiError(
            400, f"{len(queries)} queries times {k} hits exceed retriever.max_hits = {service.settings.max_hits}"
        )
    start = time.perf_counter()
    try:
        return await service.searches.search(queries, k)
    except Overloaded as error:
        raise overloaded(service, error) from None
    except ServiceStopped as error:
        raise ApiError(503, str(error), retry_after_s=1) from None
    finally:
        service.metrics.request_seconds.observe(time.perf_counter() - start)


async def search_results(service: RetrieverState, queries: Sequence[str], k: int) -> list[QueryResult]:
    """Return one result per query. Raises ApiError for the first failure: clients of this form cannot distinguish a
    failed query from one without hits."""
    outcomes = await search_outcomes(service, queries, k)
    results = [outcome for outcome in outcomes if not isinstance(outcome, QueryFailure)]
    if len(results) < len(outcomes):
        raise api_error(next(outcome for outcome in outcomes if isinstance(outcome, QueryFailure)))
    return results


def overloaded(service: RetrieverState, error: Overloaded) -> ApiError:
    """Count a refused request and return its response."""
    service.metrics.rejected.inc()
    return ApiError(error.status, str(error), retry_after_s=error.retry_after_s)


def api_error(failure: QueryFailure) -> ApiError:
    """Return the response for a failed query: 500 if this service failed, 502 if a provider did."""
    status = 500 if failure.cause in INTERNAL_CAUSES else 502
    detail = f" ({failure.detail})" if failure.detail else ""
    return ApiError(status, f"failed: {failure.cause}{detail}", cause=failure.cause)


def json_response(body: bytes) -> web.Response:
    """Return a response with a `body` that is already JSON."""
    return web.Response(body=body, content_type="application/json")
