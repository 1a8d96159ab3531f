"""Reading JSON bodies of the control routes: every wrong value is a BadRequest (HTTP 400) that names it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from rollout_server.cpu_engine.contract import BadRequest

BODY_S = 30.0
"""Longest wait for a body in seconds."""


async def read_json(http: web.Request) -> Any:
    """The body as JSON. Raises BadRequest, or the HTTP errors 408 and 413."""
    if (http.content_length or 0) > http.client_max_size:
        raise web.HTTPRequestEntityTooLarge(http.client_max_size, http.content_length or 0)
    try:
        async with asyncio.timeout(BODY_S):
            raw = await http.read()
        return json.loads(raw)
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"the body did not come within {BODY_S:g} s") from None
    except web.RequestPayloadError:
        raise BadRequest("the body is not what its headers say") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


async def read_object(http: web.Request) -> dict[str, Any]:
    """The body as an object; an empty body is an empty object."""
    if not http.can_read_body:
        return {}
    body = await read_json(http)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def optional(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A field of exactly type `kind`; `default` where it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise BadRequest(f"{name} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def required(body: dict[str, Any], name: str, kind: type) -> Any:
    """A field of exactly type `kind` that is there and, where it is a text or a list, not empty."""
    value = optional(body, name, kind, None)
    if value is None or value == "" or value == []:
        raise BadRequest(f"{name} is missing")
    return value
