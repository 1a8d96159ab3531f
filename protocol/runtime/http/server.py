"""Where the rollout server listens, and who is answered there: loopback, or whoever brings a token."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from protocol.errors import UserError
from protocol.runtime.http.auth import Access, Asked, Role, check_bind, decide, read_access
from rollout_server.config import RolloutSettings

NEEDS: Mapping[str, Role] = {
    "/status": "viewer",
    "/metrics": "viewer",
    "/openapi.json": "viewer",
    "/v1/episodes": "operator",
}
"""Role that a route asks for; episodes cost engine time and searches. What is not named here is the operator's."""


def guard(access: Access) -> Middleware:
    """Middleware that refuses what `protocol.runtime.http.auth.decide` refuses, before a body is read."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = Asked(request.path, request.headers)
        verdict = decide(asked, needs=NEEDS.get(request.path, "operator"), access=access)
        if verdict.status:
            return web.json_response({"error": verdict.message}, status=verdict.status)
        return await handler(request)

    return middleware


@asynccontextmanager
async def listening(app: web.Application, settings: RolloutSettings) -> AsyncIterator[int]:
    """`app` answers on the yielded port for the time of the block.

    Raises UserError when the address is taken, or beyond loopback without a token.
    """
    access = read_access(os.environ)
    check_bind(settings.host, access, "rollout.host")
    app.middlewares.append(guard(access))
    # a client that leaves takes its episodes with it
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
        except OSError as error:
            raise UserError(
                f"cannot listen on {settings.host}:{settings.port}",
                why=error.strerror or str(error),
                todo="choose another rollout.port, or 0 for a free one",
            ) from None
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
