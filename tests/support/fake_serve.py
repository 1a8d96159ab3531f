"""A stand-in for `foray serve`: an OpenAI-compatible endpoint that plays answers of a test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.support.scripted_server import ScriptedServer

PASSAGES = [
    {"title": "Emma (novel)", "text": "Emma is a novel by Jane Austen, published in 1815.", "score": 7.25},
    {"title": "Jane Austen", "text": "Jane Austen was an English novelist.", "score": None},
]
SEARCH = {"query": "who wrote Emma", "passages": PASSAGES, "error": None}
HOLD = "hold"
"""A step that waits until the client leaves or the test releases it."""


def thinks(text: str) -> dict[str, Any]:
    return _chunk({"reasoning_content": text})


def says(text: str) -> dict[str, Any]:
    return _chunk({"content": text})


def searched(search: dict[str, Any]) -> dict[str, Any]:
    return _chunk({}) | {"foray": {"searches": [search]}}


def ends(*searches: dict[str, Any], reason: str = "stop", version: int | None = 12, cause: str = "") -> dict[str, Any]:
    extra = {"searches": list(searches), "version": version, "turns": len(searches) + 1, "cause": cause}
    return _chunk({}, reason) | {"foray": extra}


def _chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


EMMA = (thinks("\nI should look"), thinks(" it up.\n"), searched(SEARCH), thinks("It is Austen."), says("Jane "),
        says("Austen"), ends(SEARCH))  # fmt: skip


class FakeServe(ScriptedServer):
    """Plays `steps`: chunks, raw bytes, HOLD, or a function of the request's body that returns steps.

    requests   bodies so far
    tokens     their Authorization headers
    left       number of clients that left before the end
    cuts       leave out the end of the stream
    """

    def __init__(self, steps: Sequence[Any] | Callable[[Any], Sequence[Any]] = EMMA, token: str = "") -> None:
        super().__init__()
        self.steps, self.token = steps, token
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.left = 0
        self.cuts = False
        self.held, self.released = threading.Event(), asyncio.Event()

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    def _refusal(self, request: web.Request) -> web.Response | None:
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.token and self.tokens[-1] != f"Bearer {self.token}":
            return web.json_response({"error": {"message": "no valid token", "type": "auth"}}, status=401)
        return None

    async def _models(self, request: web.Request) -> web.Response:
        cards = [
            {"id": "emma-bare", "foray": {"loop": False, "version": 12, "policy": "runs/emma"}},
            {"id": "emma", "foray": {"loop": True, "version": 12, "policy": "runs/emma"}},
        ]
        return self._refusal(request) or web.json_response({"object": "list", "data": cards})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        self.requests.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for step in self.steps(body) if callable(self.steps) else self.steps:
                if step == HOLD:
                    self.held.set()
                    await self.released.wait()
                else:
                    await response.write(step if isinstance(step, bytes) else f"data: {json.dumps(step)}\n\n".encode())
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise
        if not self.cuts:
            await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def serving(server: FakeServe) -> Iterator[FakeServe]:
    """Run the server in a thread, for clients that block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(30)

    wait(server.start())
    try:
        yield server
    finally:
        wait(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
