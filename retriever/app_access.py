"""Who may call which route of the retriever: anybody on this machine, or whoever brings a token of the right role."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from protocol.access import Access, Role, decide

NEEDS: Mapping[str, Role] = {"/metrics": "viewer", "/info": "viewer", "/openapi.json": "viewer", "/v1/models": "viewer"}
"""Routes that say how the service is. All others give out passages or cost the machine, or a provider's money: node."""


def guard(access: Access) -> Middleware:
    """Middleware that answers 401 and 403 as `protocol.access.decide` says, before a body is read."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        verdict = decide(
            request.path,
            needs=NEEDS.get(request.path, "node"),
            authorization=request.headers.get("Authorization", ""),
            host=request.headers.get("Host", ""),
            access=access,
        )
        if verdict.status == 0:
            return await handler(request)
        error = {"message": verdict.message, "type": "invalid_request_error", "param": None, "code": "unauthorized"}
        openai = request.path.startswith("/v1/")
        return web.json_response({"error": error if openai else verdict.message}, status=verdict.status)

    return middleware
