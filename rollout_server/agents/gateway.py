"""The gateway: an OpenAI-compatible endpoint for agents, on a separate port.

    POST /v1/chat/completions   the policy, as chat completions
    POST /v1/responses          the same, as the Responses API
    POST /v1/search             {"query": ...} -> {"passages": [{"id", "title", "text", "contents"}], "error": ""}
    GET  /v1/models             the name of the policy

A random key (`Authorization: Bearer KEY`) names a trajectory and is all that an agent can do; 404 for one that is
unknown or closed, so a call after the end of a trajectory changes nothing. A turn is generated as a whole and then
sent, as a stream too: comments keep the connection open meanwhile.

A client that goes away does not end its turn: its repetition gets it. A request is a repetition if its body is equal
and it says so (`x-stainless-retry-count`, of OpenAI's clients), or the client of the first one is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

from aiohttp import web
from pydantic import BaseModel, Field

from protocol.runtime.http import sse
from protocol.runtime.http.body import parse_json
from protocol.runtime.http.server import SERVER_OPTIONS, listening
from protocol.runtime.timing import loop_timeout
from rollout_server.agents import chat_completions, responses
from rollout_server.agents.chat_completions import Items
from rollout_server.agents.config import OwnAgentSettings
from rollout_server.agents.messages import Ask, CallRefused, Turn, validated
from rollout_server.agents.recorded import LIMIT, Recorded, Reply
from rollout_server.agents.runners import AgentAccess

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Maximum request body in bytes."""
BODY_S = 60.0
"""Timeout for receiving a request body, in seconds."""
ALIVE_S = 10.0
"""Interval of the comments in a stream, in seconds; an answer that comes sooner has its HTTP status."""
WRITE_S = 60.0
"""A client that reads nothing for this long is disconnected."""
FINAL: Mapping[str, str] = {"x-should-retry": "false"}
"""Headers of an error that a repetition would get again, for OpenAI's clients."""
CLOSED = "the key names no trajectory in progress: it has ended, or never existed"


class Dialect(Protocol):
    """How one API asks and answers: a module."""

    def parse(self, body: Mapping[str, Any], items: Items) -> Ask:
        """Return what a body asks for. Raises CallRefused."""

    def whole(self, ask: Ask, turn: Turn, items: Items) -> dict[str, Any]:
        """Return the answer without stream."""

    def events(self, ask: Ask, turn: Turn, items: Items) -> Iterator[str]:
        """Yield the server-sent events of a finished turn."""

    def failed(self, error: CallRefused) -> str:
        """Return the event of an error."""


DIALECTS: Mapping[str, Dialect] = {"/v1/chat/completions": chat_completions, "/v1/responses": responses}


class _SearchBody(BaseModel):
    query: str = Field(max_length=1 << 16)


class Gateway:
    """Maps keys to trajectories and serves their calls. `counts` receives `agent_refusals` and `agent_late_calls`."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._recorded: dict[str, Recorded] = {}
        self._url = ""

    @asynccontextmanager
    async def listening(self, settings: OwnAgentSettings) -> AsyncIterator[int]:
        """Serve while the block runs; yield the port. Raises UserError if the address cannot be used."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, handler_args=SERVER_OPTIONS)
        for path, dialect in DIALECTS.items():
            app.router.add_post(path, self._handler(dialect))
        app.router.add_post("/v1/search", self._search)
        app.router.add_get("/v1/models", self._models)
        todo = "set another rollout.agent.port, or 0 to pick a free one"
        # every route needs a key, so it may listen on any address without the tokens of the service
        async with listening(
            app, settings.host, settings.port, access=None, setting="rollout.agent.host", todo=todo
        ) as listener:
            self._url = settings.url.rstrip("/") or listener.url
            yield listener.port

    @contextmanager
    def admitting(self, recorded: Recorded) -> Iterator[AgentAccess]:
        """Answer calls with a new key from `recorded` while the block runs."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._recorded[key] = recorded
        try:
            yield AgentAccess(f"{self._url}/v1", key)
        finally:
            del self._recorded[key]

    def _find(self, request: web.Request) -> Recorded:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        found = self._recorded.get(key)
        if found is None:
            self._counts["agent_late_calls"] += 1
            raise CallRefused(CLOSED, status=404, code="not_found")
        return found

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            recorded = None
            try:
                recorded = self._find(request)
                raw, body = await read_body(request)
                ask = dialect.parse(body, recorded.items)
                digest = hashlib.sha256(request.path.encode() + raw).digest()
                again = request.headers.get("x-stainless-retry-count", "0") != "0"
                return await _answer(request, dialect, ask, recorded.items, recorded.reply(ask, digest, retry=again))
            except CallRefused as error:
                return self._refused(error, recorded)

        return handle

    async def _search(self, request: web.Request) -> web.Response:
        recorded = None
        try:
            recorded = self._find(request)
            query = validated(_SearchBody, (await read_body(request))[1]).query
            result = await recorded.search(query)
        except CallRefused as error:
            return self._refused(error, recorded)
        found = [{"id": p.id, "title": p.title, "text": p.text, "contents": p.contents} for p in result.passages]
        return web.json_response({"passages": found, "error": result.error})

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._find(request)
        except CallRefused as error:
            return self._refused(error, None)
        policy = {"id": "policy", "object": "model", "created": 0, "owned_by": "foray"}
        return web.json_response({"object": "list", "data": [policy]})

    def _refused(self, error: CallRefused, recorded: Recorded | None) -> web.Response:
        if error.status in (400, 413) and error.code != LIMIT and recorded is not None:
            self._counts["agent_refusals"] += 1
            recorded.refusal = str(error)
        return web.json_response(error.body(), status=error.status, headers=FINAL if error.status != 408 else None)


async def read_body(request: web.Request) -> tuple[bytes, dict[str, Any]]:
    """Return the body as bytes and as a JSON object, up to the application's limit. Raises CallRefused."""
    try:
        async with loop_timeout(BODY_S):
            raw = await request.read()
        body = parse_json(raw)
    except TimeoutError:
        raise CallRefused(f"the body did not arrive within {BODY_S:g} s", status=408, code="timeout") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise CallRefused(f"the body is too large: {error.text}", status=413, code="too_large") from None
    except (web.RequestPayloadError, ValueError) as error:
        raise CallRefused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise CallRefused("the body is not a JSON object", code="invalid_json")
    return raw, body


async def _answer(request: web.Request, dialect: Dialect, ask: Ask, items: Items, reply: Reply) -> web.StreamResponse:
    """Send a reply when it is there. Raises CallRefused if that can still be the status."""
    reply.waiting += 1
    try:
        response: web.StreamResponse | None = None
        while not (await asyncio.wait({reply.task}, timeout=ALIVE_S if ask.stream else None))[0]:
            response = response or await _begin(request)
            await sse.write(request, response, sse.KEEPALIVE.encode(), WRITE_S)
        gone = CallRefused(CLOSED, status=404, code="not_found")
        turn = gone if reply.task.cancelled() else reply.task.result()
        if isinstance(turn, CallRefused) and response is None:
            raise turn
        if not ask.stream and isinstance(turn, Turn):
            response = web.json_response(dialect.whole(ask, turn, items))
        else:
            response = response or await _begin(request)
            events = [dialect.failed(turn)] if isinstance(turn, CallRefused) else dialect.events(ask, turn, items)
            await sse.write(request, response, "".join(events).encode(), WRITE_S)
            await sse.end(response)
        reply.sent = True
        return response
    finally:
        reply.waiting -= 1


async def _begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=sse.HEADERS)
    await response.prepare(request)
    return response
