"""What the handlers of all dialects share: the service's parts, errors as JSON, and one search as outcomes.

Every error is JSON with at least {"error": "what happened"}; dialects may add the field that their clients read.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from aiohttp import web
from pydantic import BaseModel, ValidationError

from retriever.backends.base import Backend, Fault, Kind
from retriever.config import RetrieverSettings
from retriever.metrics import Metrics
from retriever.serving.admission import Overloaded
from retriever.serving.batcher import Batcher, Stopped
from retriever.serving.cache import Answer
from retriever.serving.service import Searches

NOT_OPEN = "the index is not open"
OUR_FAULTS = frozenset({"index", "rerank", "internal"})
"""Causes that are this service's own (500); others are a provider's (502)."""

BODY_S = 30.0
"""Longest wait for a body in seconds: one that drips in would hold the memory that others wait for."""
_SMALL, _BODIES = 1 << 16, 4
"""Bodies up to so many bytes are not counted; of the others so many of the largest size are held at once."""

Body = TypeVar("Body", bound=BaseModel)


class Text(NamedTuple):
    """One text to embed, as a batcher's key."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Embedding:
    """What `/v1/embeddings` needs: the encoder's name, and the queue before it."""

    model: str
    texts: Batcher[Text, npt.NDArray[np.float32]]


class Service:
    """What the handlers share. `backend` and what asks it are None until it is open, `draining` ends readiness.
    `num_passages` is None while it is not known, and for an online engine."""

    def __init__(self, settings: RetrieverSettings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.backend: Backend | None = None
        self.searches: Searches | None = None
        self.embedding: Embedding | None = None
        self.num_passages: int | None = None
        self.draining = False
        self._body_bytes = 0

    @asynccontextmanager
    async def holding(self, num_bytes: int) -> AsyncIterator[None]:
        """Memory for a body while the block runs. Raises Refusal 429 (503 with `overload: wait`) where large bodies
        of others fill it."""
        if num_bytes <= _SMALL:
            yield
            return
        if self._body_bytes and self._body_bytes + num_bytes > _BODIES * self.settings.max_body_mb * 2**20:
            self.metrics.rejected.inc()
            status = 503 if self.settings.overload == "wait" else 429
            raise Refusal(status, "too many large requests at once", retry_s=1)
        self._body_bytes += num_bytes
        try:
            yield
        finally:
            self._body_bytes -= num_bytes

    @property
    def ready(self) -> bool:
        """Whether searches are answered."""
        return self.searches is not None and not self.draining


SERVICE = web.AppKey("service", Service)


class Refusal(Exception):
    """An answer other than 200, raised by any part of a handler and shaped by its dialect."""

    def __init__(self, status: int, message: str, *, retry_s: float | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.retry_s, self.cause = status, message, retry_s, cause

    def headers(self) -> dict[str, str]:
        """`Retry-After`, where trying again makes sense."""
        return {} if self.retry_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_s)))}


@asynccontextmanager
async def reading(kind: type[Body], request: web.Request) -> AsyncIterator[Body]:
    """The request's body, checked, and its memory held until the block ends: while it waits for its turn, too.

    Raises Refusal 400 with the first fault in words: a body with thousands of bad queries needs no longer answer. Odd
    queries are made searchable and counted (`protocol.search.Query`).
    """
    service = request.app[SERVICE]
    size, most = request.content_length, int(service.settings.max_body_mb * 2**20)
    if size is not None and size > most:  # before it takes the room of others
        raise web.HTTPRequestEntityTooLarge(most, size)
    # a body of unknown length may become as long as any
    async with service.holding(most if size is None else size):
        try:
            async with asyncio.timeout(BODY_S):
                raw = await request.read()
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {BODY_S:g} s") from None
        except web.RequestPayloadError:
            raise Refusal(400, "the body is not what its headers say") from None
    async with service.holding(len(raw)):
        yield _checked(service, kind, raw)


def _checked(service: Service, kind: type[Body], raw: bytes) -> Body:
    odd = Counter[str]()
    try:
        # not pydantic's own parser: it refuses a body for one lone surrogate in it
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"Invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(400, "the body is not a JSON object")
    most = service.settings.max_hits
    for name, value in content.items():  # before anything looks at each item
        if isinstance(value, list) and len(value) > most:
            raise Refusal(400, f"{name:.64}: {len(value)} items are more than retriever.max_hits = {most}")
    try:
        body = kind.model_validate(content, context=odd)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refusal(400, f"{where}: {first['msg']}" if where else first["msg"]) from None
    service.metrics.odd(odd)
    return body


def _hits(service: Service, asked: int) -> int:
    """`asked`, or the whole corpus where that has no more. Raises Refusal 400 beyond `max_topk`."""
    most, passages = service.settings.max_topk, service.num_passages
    if asked <= most:
        return asked
    if passages is not None and passages <= most:
        return max(1, passages)
    raise Refusal(400, f"{asked} hits a query are more than retriever.max_topk = {most}")


async def outcomes_of(service: Service, queries: Sequence[str], k: int, run: str = "") -> list[Answer | Fault]:
    """One outcome a query. Raises Refusal 400, 429 and 503."""
    if service.searches is None or service.draining:
        raise Refusal(503, NOT_OPEN, retry_s=1)
    k = _hits(service, k)
    if len(queries) * k > service.settings.max_hits:
        raise Refusal(400, f"{len(queries)} queries times {k} hits are more than {service.settings.max_hits}")
    start = time.perf_counter()
    try:
        return await service.searches.search(queries, k, run)
    except Overloaded as error:
        raise overloaded(service, error) from None
    except Stopped as error:
        raise Refusal(503, str(error), retry_s=1) from None
    finally:
        service.metrics.request_seconds.observe(time.perf_counter() - start)


async def answers_of(service: Service, queries: Sequence[str], k: int, run: str = "") -> list[Answer]:
    """One answer a query, or a Refusal for the first that failed: clients of this form cannot tell a failure of one
    query from an empty result."""
    outcomes = await outcomes_of(service, queries, k, run)
    answers = [outcome for outcome in outcomes if not isinstance(outcome, Fault)]
    if len(answers) < len(outcomes):
        raise refusal_of(next(outcome for outcome in outcomes if isinstance(outcome, Fault)))
    return answers


def overloaded(service: Service, error: Overloaded) -> Refusal:
    """The answer where the queue stayed full, counted."""
    service.metrics.rejected.inc()
    return Refusal(error.status, str(error), retry_s=error.wait_s)


def refusal_of(fault: Fault) -> Refusal:
    """What failed, as an answer: 500 where it is our fault, 502 where it is somebody else's."""
    status = 500 if fault.cause in OUR_FAULTS else 502
    detail = f" ({fault.detail})" if fault.detail else ""
    return Refusal(status, f"failed: {fault.cause}{detail}", cause=fault.cause)
