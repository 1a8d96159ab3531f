"""Reading JSON bodies of the control routes: every wrong value is a BadRequest (HTTP 400) that names it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from rollout_server.cpu_engine.contract import BadRequest

BODY_S = 30.0
"""Longest wait for a body in seconds."""
LARGE_BODY = 1 << 16
"""Bytes of a body beyond which it is not checked on the event loop: encoding 1 MiB of text takes seconds."""
_LARGE_WORK = ThreadPoolExecutor(1, "large-body")
T = TypeVar("T")


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


async def unblocked(large: bool, work: Callable[[], T]) -> T:
    """`work()`; where it is `large`, in a thread of its own kind, so that the event loop serves others meanwhile.

    There is one such thread: large works wait for each other, and for nothing else in the default executor.
    """
    return await asyncio.get_running_loop().run_in_executor(_LARGE_WORK, work) if large else work()


async def is_large(http: web.Request) -> bool:
    """Whether the body, which has been read, may hold a text that takes long to encode."""
    return len(await http.read()) > LARGE_BODY


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
