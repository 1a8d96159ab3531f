"""Who may call which route of the retriever: anybody on this machine, or whoever brings a token of the right role."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from protocol.access import Access, Role
from protocol.http_rules import Asked, decide

NEEDS: Mapping[str, Role] = {"/metrics": "viewer", "/info": "viewer", "/openapi.json": "viewer", "/v1/models": "viewer"}
"""Routes that say how the service is. All others give out passages or cost the machine, or a provider's money: node."""


def guard(access: Access) -> Middleware:
    """Middleware that refuses what `protocol.http_rules.decide` refuses, before a body is read."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = Asked(request.path, request.headers)
        verdict = decide(asked, needs=NEEDS.get(request.path, "node"), access=access)
        if verdict.status == 0:
            return await handler(request)
        code = "unsupported_media_type" if verdict.status == 415 else "unauthorized"
        error = {"message": verdict.message, "type": "invalid_request_error", "param": None, "code": code}
        openai = request.path.startswith("/v1/")
        return web.json_response({"error": error if openai else verdict.message}, status=verdict.status)

    return middleware
