"""Access control of the routes (SGLang's rules for keys, Foray's for requests), and error responses."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from protocol.errors import UserError
from protocol.runtime.http.auth import OPEN as PROBES
from protocol.runtime.http.auth import RequestHead, check_request
from rollout_server.cpu_engine.model.loader import WeightsError
from rollout_server.cpu_engine.scheduler.engine import Refused
from rollout_server.cpu_engine.server.validation import BadRequest

log = logging.getLogger(__name__)

OPEN = frozenset({"/health", "/health_generate", "/ready", "/metrics"})
CLIENT_GONE = 499
"""Status of nginx for a request whose client has disconnected. It cannot be sent."""
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"} | dict.fromkeys(
    (500, 503), "server_error"
)
"""Status -> OpenAI's `type` of the error. Other statuses are errors of the request."""


def guard(api_key: str, admin_key: str, admin: Collection[str] = ()) -> Middleware:
    """Return the middleware. OPEN routes need no key, those in `admin` the admin key if there is one, others the API
    key.

    Without an API key the engine listens on loopback only and rejects requests from web pages (SGLang does not).
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = "" if request.path in OPEN else admin_key if admin_key and request.path in admin else api_key
        if key and not _matches(request.headers.get("Authorization", ""), key):
            return problem(401, "Unauthorized")
        if request.path not in PROBES:
            head = RequestHead(request.path, request.headers)
            verdict = check_request(head, is_open=not api_key)
            if verdict.status:
                return problem(verdict.status, verdict.message)
        try:
            return await handler(request)
        except (BadRequest, Refused, WeightsError) as error:
            return problem(400, str(error))
        except UserError as error:
            return problem(400, f"{error.what}: {error.why}" if error.why else error.what)
        except web.HTTPException as error:
            return problem(error.status, error.reason)
        except Exception as error:
            if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
                return web.Response(status=CLIENT_GONE)  # aiohttp logs errors, but not that it cannot send a response
            log.exception("%s %s failed", request.method, request.path)
            return problem(500, f"{type(error).__name__}: {error}")

    return middleware


def problem(status: int, message: str) -> web.Response:
    """Return an error in the formats of OpenAI (`error`), SGLang (`message`, `type`, `code`) and control routes."""
    what = {"message": message, "type": KINDS.get(status, "invalid_request_error"), "param": None, "code": status}
    return web.json_response({"object": "error", "success": False, **what, "error": what}, status=status)


def _matches(header: str, key: str) -> bool:
    return secrets.compare_digest(header.encode("utf-8", "replace"), f"Bearer {key}".encode())
