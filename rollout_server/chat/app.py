"""The HTTP endpoint of a policy, for OpenAI's clients.

    POST /v1/chat/completions   NAME plays the search loop here; NAME-bare is the policy alone, with history and tools
    GET  /v1/models             both names
    GET  /metrics               Prometheus
    GET  /health                200, without a token

A text is streamed as it is generated. A client that leaves ends its answer and the engine's request. More calls than
the limit get 429, which OpenAI's clients repeat.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, Field

from protocol.messages import Sampling
from protocol.runtime.http import sse
from protocol.runtime.http.auth import Access, Verdict
from protocol.runtime.http.server import SERVER_OPTIONS, auth_middleware
from rollout_server.agents import chat_completions
from rollout_server.agents.gateway import ALIVE_S, FINAL, WRITE_S, read_body
from rollout_server.agents.messages import Ask, CallRefused, Turn, validated
from rollout_server.agents.renderer import Said
from rollout_server.chat.answers import Answers, ChatWishes, Event, Finished, Searched, TextDelta
from rollout_server.metrics import Stats, prometheus_text

log = logging.getLogger(__name__)

BARE = "-bare"
"""Ending of the name of the policy alone."""
LOOP = "Answers the last message of the user: it searches on this server. Earlier messages are not read."
ALONE = "The policy alone, with the messages and tools of the call; the client runs the tools."
_REFUSED = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0}
"""Parameters that the engines do not have -> values that ask for nothing."""


@dataclass(frozen=True)
class ChatOptions:
    """How a policy is served.

    name         model name of the loop
    policy       short name of what is served
    token        what a client must send
    origins      origins of web pages that may call, "*" for all
    concurrency  maximum number of calls in progress
    max_tokens   maximum tokens of one answer; None: those of the episode's settings
    max_body     maximum size of a request in bytes
    version      step of the policy if it does not change; None: it is unknown, or that of a run in progress
    trains       a run in progress is served: a version is that of the sampled tokens
    """

    name: str
    policy: str
    token: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    origins: tuple[str, ...] = ()
    concurrency: int = 256
    max_tokens: int | None = None
    max_body: int = 4 << 20
    version: int | None = None
    trains: bool = False


class _Extension(BaseModel, extra="forbid"):
    search: bool = True


class _Wants(BaseModel):
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    foray: _Extension = _Extension()


class ChatApp:
    """Answers requests. `counts` of `stats` receives `chat_calls`, `chat_refused`, `chat_left` and `chat_tokens`."""

    def __init__(self, answers: Answers, options: ChatOptions, stats: Stats, run: str) -> None:
        self._answers, self._options, self._stats, self._run = answers, options, stats, run
        self._active = 0
        stats.counts.update(dict.fromkeys(("chat_calls", "chat_refused", "chat_left", "chat_tokens"), 0))
        stats.gauges["chat_in_progress"] = lambda: self._active

    def build(self) -> web.Application:
        """Return the aiohttp application."""
        access = Access({"operator": self._options.token})
        app = web.Application(
            middlewares=[self._preflight, auth_middleware(access, {}, default="operator", refuse=_denied)],
            client_max_size=self._options.max_body,
            handler_args=SERVER_OPTIONS,
        )
        app.on_response_prepare.append(self._allow_origin)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(self._stats, self._run), content_type="text/plain", charset="utf-8")

    async def _models(self, request: web.Request) -> web.Response:
        options = self._options
        told = {"version": self._answers.version(None), "policy": options.policy}
        names = {options.name: LOOP, options.name + BARE: ALONE}
        common = {"object": "model", "created": 0, "owned_by": "foray"}
        data = [
            {"id": name, **common, "description": text, "foray": {"loop": text is LOOP, **told}}
            for name, text in names.items()
        ]
        return web.json_response({"object": "list", "data": data})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._stats.counts["chat_calls"] += 1
        if self._active >= self._options.concurrency:
            full = CallRefused(f"{self._active} calls are in progress", status=429, code="rate_limit_exceeded")
            return self._refused(full, {"Retry-After": "1"})
        self._active += 1
        done = False
        try:
            _, body = await read_body(request)
            ask, answer = self._asked(body)
            async with aclosing(answer):
                response = await (self._stream(request, ask, answer) if ask.stream else self._whole(ask, answer))
            done = True
            return response
        except CallRefused as error:
            done = True
            return self._refused(error, None if error.status in (408, 503) else FINAL)
        finally:
            self._active -= 1
            self._stats.counts["chat_left"] += not done

    def _refused(self, error: CallRefused, headers: Mapping[str, str] | None) -> web.Response:
        self._stats.counts["chat_refused"] += 1
        return web.json_response(error.body(), status=error.status, headers=headers)

    def _asked(self, body: dict[str, Any]) -> tuple[Ask, AsyncGenerator[list[Event], None]]:
        """Return what a body asks for, and what answers it. Raises CallRefused."""
        ask, wants, options = chat_completions.parse(body, {}), validated(_Wants, body), self._options
        for name, nothing in _REFUSED.items():
            if body.get(name) not in (None, nothing):
                raise CallRefused(f"{name} is not supported: leave it out", field=name)
        if ask.model not in ("", options.name, options.name + BARE):
            why = f"there is no model {ask.model[:100]!r}: GET /v1/models lists {options.name}, {options.name}{BARE}"
            raise CallRefused(why, status=404, code="model_not_found", field="model")
        limit = min(filter(None, (ask.limit, options.max_tokens)), default=None)
        given = {name: getattr(wants, name) for name in ("temperature", "top_p", "top_k")}
        sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
        wanted = ChatWishes(sampling.model_copy(update={"top_k": sampling.top_k or -1}), wants.seed, wants.foray.search)
        # "none" offers no tool
        ask = Ask(**(vars(ask) | {"limit": limit} | ({"tools": ()} if body.get("tool_choice") == "none" else {})))
        return ask, (self._answers.bare if ask.model.endswith(BARE) else self._answers.loop)(ask, wanted)

    async def _whole(self, ask: Ask, answer: AsyncGenerator[list[Event], None]) -> web.StreamResponse:
        last: Event | None = None
        async for events in answer:
            last = events[-1] if events else last
        assert isinstance(last, Finished)
        self._stats.counts["chat_tokens"] += last.turn.completion_tokens
        return web.json_response(chat_completions.whole(ask, last.turn, {}) | {"foray": last.facts})

    async def _stream(
        self, request: web.Request, ask: Ask, answer: AsyncGenerator[list[Event], None]
    ) -> web.StreamResponse:
        """Send events as they come. An error before the first one has its HTTP status, a later one is an event."""
        response = web.StreamResponse(headers=sse.HEADERS)
        head = Turn(uuid.uuid4().hex, Said(""), False, 0, 0, int(time.time()))
        sent_at = time.monotonic()

        async def send(text: str) -> None:
            nonlocal sent_at
            if not response.prepared:
                await response.prepare(request)
                text = chat_completions.chunk(ask, head, {"role": "assistant", "content": ""}) + text
            await sse.write(request, response, text.encode(), WRITE_S)
            sent_at = time.monotonic()

        try:
            async for events in answer:
                if text := "".join(self._event(ask, head, event) for event in events):
                    await send(text)
                elif time.monotonic() - sent_at >= ALIVE_S:
                    await send(sse.KEEPALIVE)
        except CallRefused as error:
            if not response.prepared:
                raise
            self._stats.counts["chat_refused"] += 1
            await send(chat_completions.failed(error))
        await sse.end(response)
        return response

    def _event(self, ask: Ask, head: Turn, event: Event) -> str:
        match event:
            case TextDelta(name, text):
                return chat_completions.chunk(ask, head, {name: text})
            case Searched(search):
                return chat_completions.chunk(ask, head, {}, foray={"searches": [search]})
            case Finished(turn, facts):
                self._stats.counts["chat_tokens"] += turn.completion_tokens
                return "".join(chat_completions.last_events(ask, head, turn, foray=facts))

    @web.middleware
    async def _preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "OPTIONS" and self._allowed(request):
            asked = request.headers.get("Access-Control-Request-Headers", "")
            allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
            return web.Response(status=204, headers=allowed | {"Access-Control-Allow-Headers": asked})
        return await handler(request)

    def _allowed(self, request: web.Request) -> str:
        """Return the origin of a request if its pages may call; "" otherwise."""
        origin = request.headers.get("Origin", "")
        return origin if origin and not {origin, "*"}.isdisjoint(self._options.origins) else ""

    async def _allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        if origin := self._allowed(request):
            response.headers.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})


def _denied(request: web.Request, verdict: Verdict) -> web.Response:
    wrong = "the token is missing or wrong: Authorization: Bearer TOKEN, which `foray serve` printed"
    error = CallRefused(wrong if verdict.status == 401 else verdict.message, status=verdict.status)
    error.code = "invalid_api_key" if verdict.status == 401 else error.code
    return web.json_response(error.body(), status=error.status)
