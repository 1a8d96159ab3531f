"""A provider for tests: real HTTP on a free port, the JSON of every provider, faults by script.

It checks what a provider checks (where the key is, its limit for the number of hits) and keeps what it was sent.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from retriever.backends.web.provider import ProviderHit

KEY = "k3y/of+the=account-0123456789"
"""The key that is expected; some of its characters are escaped in an address, and differently in JSON."""

Shape = Callable[["FakeProvider", str, int], dict[str, Any]]


@dataclass
class Request:
    """One request as it came."""

    query: str
    count: int | None
    path_qs: str
    headers: dict[str, str]


@dataclass
class FakeProvider:
    """Answers every query with `found`. `script` holds what to do instead, one entry a request, then normal again:

    a number (that status), "hang", "drop", "huge", "html", "list", "truncated", "empty", "odd" or a web.Response.
    """

    kind: str
    found: list[ProviderHit] = field(default_factory=list)
    script: deque[Any] = field(default_factory=deque)
    seen: list[Request] = field(default_factory=list)
    url: str = ""
    pause_s: float = 0.0
    """Before each answer."""
    under_way: int = 0
    most_under_way: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """See the class."""
        body = await request.json() if request.method == "POST" else {}
        given: dict[str, Any] = dict(request.query) | body
        query, count = str(given.get("q", given.get("query", ""))), _count(given)
        self.seen.append(Request(query, count, request.path_qs, dict(request.headers)))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.pause_s)
            return await self._answer(request, query, count)
        finally:
            self.under_way -= 1

    async def _answer(self, request: web.Request, query: str, count: int | None) -> web.StreamResponse:
        if self.script:
            step = self.script.popleft()
            if isinstance(step, web.StreamResponse):
                return step
            if step == "hang":
                await asyncio.sleep(60)
            if step == "drop":
                assert request.transport is not None
                request.transport.close()
            if isinstance(step, int):
                return web.json_response({"error": f"refused, and here is your key: {_sent_key(request)}"}, status=step)
            if step in _BODIES:
                return web.Response(body=_BODIES[step], content_type="application/json")
            if step == "empty":
                return web.json_response(SHAPES[self.kind](FakeProvider(self.kind), query, 10))
        if KEY not in _sent_key(request) and self.kind != "searxng":
            return web.json_response({"error": "who are you?"}, status=401)
        if self.kind == "google_cse" and count is not None and count > 10:
            return web.json_response({"error": "num is too large"}, status=400)
        echoed = {"metadata": {"asked": f"{request.path_qs} {_sent_key(request)}"}}
        text = json.dumps(SHAPES[self.kind](self, query, count or 10) | echoed)
        return web.Response(text=text.replace("/", "\\/"), content_type="application/json")

    def boxes(self) -> list[ProviderHit]:
        """The answer boxes among `found`."""
        return [item for item in self.found if item.box]

    def pages(self, names: tuple[str, str, str], count: int) -> list[dict[str, str]]:
        """The pages among `found` under a provider's names of title, text and address."""
        pages = [item for item in self.found if not item.box]
        return [dict(zip(names, item[:3], strict=True)) for item in pages[:count]]


@asynccontextmanager
async def fake_provider(kind: str, found: list[ProviderHit]) -> AsyncIterator[FakeProvider]:
    """A running provider of one kind; its `url` goes into `base_url`."""
    fake = FakeProvider(kind, found)
    app = web.Application()
    app.router.add_route("*", "/search", fake.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/search"
        yield fake
    finally:
        await runner.cleanup()


_BODIES = {
    "huge": b'{"organic": "' + b"x" * (6 << 20) + b'"}',
    "html": b"<html><body>Just a moment...</body></html>",
    "list": b"[1, 2]",
    "truncated": b'{"results": [',
    "odd": b'{"unheard": "of"}',
}


def _count(given: dict[str, Any]) -> int | None:
    return next((int(given[name]) for name in ("num", "count", "max_results") if name in given), None)


def _sent_key(request: web.Request) -> str:
    names = ("X-API-KEY", "X-Subscription-Token", "Authorization", "Ocp-Apim-Subscription-Key")
    in_address = [request.query[name] for name in ("api_key", "key") if name in request.query]
    return " ".join([*in_address, *(request.headers[name] for name in names if name in request.headers)])


def _serpapi(fake: FakeProvider, query: str, count: int) -> dict[str, Any]:
    reply: dict[str, Any] = {"search_metadata": {"status": "Success"}}
    boxes, pages = fake.boxes(), fake.pages(("title", "snippet", "link"), count)
    if boxes:
        reply["answer_box"] = {
            "type": "organic_result",
            **dict(zip(("title", "answer", "link"), boxes[0], strict=False)),
        }
    if boxes[1:]:
        reply["knowledge_graph"] = dict(zip(("title", "description", "website"), boxes[1], strict=False))
    if not pages:
        return reply | {"error": "Google hasn't returned any results for this query."}
    return reply | {"organic_results": pages}


def _serper(fake: FakeProvider, query: str, count: int) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "searchParameters": {"q": query},
        "organic": fake.pages(("title", "snippet", "link"), count),
    }
    boxes = fake.boxes()
    if boxes:
        reply["answerBox"] = dict(zip(("title", "answer", "link"), boxes[0], strict=False))
    if boxes[1:]:
        reply["knowledgeGraph"] = dict(zip(("title", "description", "website"), boxes[1], strict=False))
    return reply


def _google_cse(fake: FakeProvider, query: str, count: int) -> dict[str, Any]:
    pages = fake.pages(("title", "snippet", "link"), count)
    return {"kind": "customsearch#search"} | ({"items": pages} if pages else {})


def _brave(fake: FakeProvider, query: str, count: int) -> dict[str, Any]:
    pages = fake.pages(("title", "description", "url"), count)
    reply: dict[str, Any] = {"type": "search"} | ({"web": {"results": pages}} if pages else {})
    boxes = [dict(zip(("title", "long_desc", "website_url"), box, strict=False)) for box in fake.boxes()]
    return reply | ({"infobox": {"type": "graph", "results": boxes}} if boxes else {})


def _tavily(fake: FakeProvider, query: str, count: int) -> dict[str, Any]:
    answer = next((box.text for box in fake.boxes()), None)
    return {"query": query, "answer": answer, "results": fake.pages(("title", "content", "url"), count)}


def _searxng(fake: FakeProvider, query: str, count: int) -> dict[str, Any]:
    boxes = fake.boxes()
    infoboxes = [{"infobox": b.title, "content": b.text, "urls": [{"url": b.url}] if b.url else []} for b in boxes[1:]]
    answers: list[Any] = [{"answer": box.text, "url": box.url or None} for box in boxes[:1]]
    pages = fake.pages(("title", "content", "url"), 1000)
    return {"query": query, "results": pages, "answers": answers, "infoboxes": infoboxes, "suggestions": []}


SHAPES: dict[str, Shape] = {
    "serpapi": _serpapi,
    "serper": _serper,
    "google_cse": _google_cse,
    "brave": _brave,
    "tavily": _tavily,
    "searxng": _searxng,
}
