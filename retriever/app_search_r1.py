"""Search-R1's dialect: `POST /retrieve {"queries", "topk", "return_scores"}`, see `protocol.search`.

Search-R1's own server answers `return_scores: false` wrongly (its loop unpacks a list of documents as if it were a
pair); here all three forms are right. `partial` and `run` are ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from aiohttp import web

from protocol.search import SearchRequest
from retriever.app_base import SERVICE, answers_of, outcomes_of, read_body
from retriever.backend import Fault
from retriever.cache import Answer

_NOTHING = Answer((), ())


async def retrieve(request: web.Request) -> web.Response:
    """`POST /retrieve`."""
    service = request.app[SERVICE]
    body = await read_body(SearchRequest, request)
    k = body.topk or service.settings.topk
    if not body.partial:
        answers = await answers_of(service, body.queries, k, body.run)
        return _json(render(answers, scores=body.return_scores))
    outcomes = await outcomes_of(service, body.queries, k, body.run)
    answers = [_NOTHING if isinstance(outcome, Fault) else outcome for outcome in outcomes]
    errors = [outcome.cause if isinstance(outcome, Fault) else None for outcome in outcomes]
    return _json(render(answers, scores=body.return_scores, errors=errors if any(errors) else None))


def render(answers: Sequence[Answer], *, scores: bool, errors: Sequence[str | None] | None = None) -> bytes:
    """Body of the answer to `/retrieve`, put together from documents that are JSON already."""
    if scores:
        lists = [b",".join(map(_scored, answer.documents, answer.scores)) for answer in answers]
    else:
        lists = [b",".join(answer.documents) for answer in answers]
    result = b"],[".join(lists)
    body = b'{"result":[[%b]]' % result if lists else b'{"result":[]'
    return body + (b',"errors":%b}' % json.dumps(errors).encode() if errors else b"}")


def _scored(document: bytes, score: float) -> bytes:
    return b'{"document":%b,"score":%b}' % (document, repr(score).encode())


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
