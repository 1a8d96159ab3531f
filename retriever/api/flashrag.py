"""The dialect of ReSearch's and ReCall's server over FlashRAG (their `scripts/serving/retriever_serving.py`).

    POST /search        {"query": "..", "top_n": 10, "return_score": false}
                        -> [{"id", "contents"}, ..]               or [[documents], [scores]]
    POST /batch_search  {"query": ["..", ..], "top_n": 10, "return_score": false}
                        -> [[{"id", "contents"}, ..], ..]         or [[[documents], ..], [[scores], ..]]

As in FlashRAG, `/search` refuses a blank query, and `/batch_search` returns no hits for it. Errors also have FastAPI's
`detail`. The format cannot report the failure of one query, so any failure fails the request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from protocol.search import Queries, Query
from retriever.api.base import SERVICE, ApiError, json_response, request_body, search_results
from retriever.backends.base import QueryResult


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    top_n: int = Field(default=10, ge=1)
    return_score: bool = False


class OneQuery(_Request):
    """Body of `POST /search`."""

    query: Query


class ManyQueries(_Request):
    """Body of `POST /batch_search`."""

    query: Queries


async def search(request: web.Request) -> web.Response:
    """Handle `POST /search`."""
    async with request_body(OneQuery, request) as body:
        if not body.query.strip():
            raise ApiError(400, "Query content cannot be empty")
        (answer,) = await search_results(request.app[SERVICE], [body.query], body.top_n)
    return json_response(render_one(answer, scores=body.return_score))


async def batch_search(request: web.Request) -> web.Response:
    """Handle `POST /batch_search`."""
    async with request_body(ManyQueries, request) as body:
        answers = await search_results(request.app[SERVICE], body.query, body.top_n)
    return json_response(render_many(answers, scores=body.return_score))


def render_one(answer: QueryResult, *, scores: bool) -> bytes:
    """Return the response body of `/search`."""
    documents = b"[%b]" % b",".join(answer.documents)
    return b"[%b,%b]" % (documents, _numbers(answer.scores)) if scores else documents


def render_many(answers: Sequence[QueryResult], *, scores: bool) -> bytes:
    """Return the response body of `/batch_search`."""
    documents = b"[%b]" % b",".join(render_one(answer, scores=False) for answer in answers)
    if not scores:
        return documents
    return b"[%b,[%b]]" % (documents, b",".join(_numbers(answer.scores) for answer in answers))


def _numbers(scores: Sequence[float]) -> bytes:
    return json.dumps(scores).encode()
