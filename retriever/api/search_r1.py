"""Search-R1's dialect: `POST /retrieve {"queries", "topk", "return_scores"}`, see `protocol.search`.

Search-R1's server handles `return_scores: false` wrongly (its loop unpacks a list of documents as if it were a
pair); here all three forms work. `partial` is an extension of Foray. SkyRL's and rLLM's
clients send other field names, and rLLM's reads `results`: [{"id", "content", "score"}, ..].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from protocol.search import SearchRequest
from retriever.api.base import SERVICE, json_response, request_body, search_outcomes, search_results
from retriever.backends.base import QueryFailure, QueryResult

_NO_HITS = QueryResult((), ())


async def retrieve(request: web.Request) -> web.Response:
    """Handle `POST /retrieve`."""
    service = request.app[SERVICE]
    async with request_body(SearchRequest, request) as body:
        k = body.topk or service.settings.topk
        if not body.partial:
            answers = await search_results(service, body.queries, k)
            return json_response(render(answers, scores=body.return_scores, results=body.results))
        outcomes = await search_outcomes(service, body.queries, k)
    answers = [_NO_HITS if isinstance(outcome, QueryFailure) else outcome for outcome in outcomes]
    errors = [outcome.cause if isinstance(outcome, QueryFailure) else None for outcome in outcomes]
    some_failed = errors if any(errors) else None
    return json_response(render(answers, scores=body.return_scores, errors=some_failed, results=body.results))


def render(
    answers: Sequence[QueryResult],
    *,
    scores: bool,
    errors: Sequence[str | None] | None = None,
    results: bool = False,
) -> bytes:
    """Return the response body of `/retrieve`, joined from documents that are already JSON. `results` adds the first
    result in rLLM's format."""
    if scores:
        lists = [b",".join(map(_scored, answer.documents, answer.scores)) for answer in answers]
    else:
        lists = [b",".join(answer.documents) for answer in answers]
    result = b"],[".join(lists)
    body = b'{"result":[[%b]]' % result if lists else b'{"result":[]'
    if results:
        body += b',"results":%b' % json.dumps(_for_rllm(answers[0] if answers else _NO_HITS)).encode()
    return body + (b',"errors":%b}' % json.dumps(errors).encode() if errors else b"}")


def _for_rllm(answer: QueryResult) -> list[dict[str, Any]]:
    """Return one object per hit: the document's fields, its `contents` as `content`, and `score`."""
    hits = [json.loads(document) | {"score": score} for document, score in zip(*answer, strict=True)]
    return [hit | {"content": hit.pop("contents")} for hit in hits]


def _scored(document: bytes, score: float) -> bytes:
    return b'{"document":%b,"score":%b}' % (document, repr(score).encode())
