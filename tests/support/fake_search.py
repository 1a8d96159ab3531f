"""Fakes of the search: one in this process, and a retriever on a real socket with scripted faults.

The retriever's good answers repeat the query: passage `i` of `q` has the id `q#i`, so a mixed-up answer shows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from protocol.search import Passage
from rollout_server.search.base import LocalSearch, SearchResult
from tests.support.scripted_server import ScriptedServer


class FakeSearch(LocalSearch):
    """Answers from a table.

    passages   query -> what it brings; any other query brings `otherwise`
    failures   one word for each of the first calls, "" for a call that works: ["", "timeout"] fails the second
    latency_s  seconds that each call takes
    """

    def __init__(
        self,
        passages: Mapping[str, Sequence[Passage]] | None = None,
        *,
        otherwise: Sequence[Passage] = (),
        failures: Sequence[str] = (),
        latency_s: float = 0.0,
    ) -> None:
        self._passages = dict(passages or {})
        self._otherwise = tuple(otherwise)
        self._failures = list(failures)
        self._latency_s = latency_s
        self.queries: list[str] = []

    async def __call__(self, query: str) -> SearchResult:
        call = len(self.queries)
        self.queries.append(query)
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        error = self._failures[call] if call < len(self._failures) else ""
        found = () if error else tuple(self._passages.get(query, self._otherwise))
        return SearchResult(found, self._latency_s, error)


@dataclass(frozen=True)
class Fault:
    """What the server does with one request for passages.

    body   JSON, or text or bytes as they are; None: the good answer
    until  the answer waits for it
    hang   never answer; cut: break the connection in the middle of the answer
    """

    status: int = 200
    body: Any = None
    after_s: float = 0.0
    until: asyncio.Event | None = None
    hang: bool = False
    cut: bool = False
    headers: dict[str, str] = field(default_factory=dict)


HTML = Fault(body="<!DOCTYPE html><html><body><h1>It works!</h1></body></html>")
Script = Callable[[str], Fault | None]
"""What to do with a query; None: answer it."""


class FakeRetriever(ScriptedServer):
    """`async with FakeRetriever() as retriever: retriever.url ...`

    script   may be replaced at any time; `then` sets one that fails the next requests and then answers. A request of
             several queries does what the first that has a fault says
    backend  what `/info` says; "index": clients send several queries in a request
    ready    what `/ready` says; None: there is no such path, nor `/health`, as in Search-R1's server
    asked    the body of every request for passages, in order; `queries` the first query of each
    """

    def __init__(
        self, script: Script = lambda query: None, *, hits: int = 5, fingerprint: str = "", backend: str = ""
    ) -> None:
        super().__init__()
        self.script, self.hits, self.fingerprint, self.backend = script, hits, fingerprint, backend
        self.ready: bool | None = True
        self.contents: Callable[[str, int], str] = lambda query, i: f'"T{i}"\n{query}'
        self.asked: list[dict[str, Any]] = []
        self.connections: set[object] = set()
        self.looks = self.most_in_flight = self._in_flight = 0

    @property
    def queries(self) -> list[str]:
        return [queries[0] for queries in self.posts]

    @property
    def posts(self) -> list[list[str]]:
        """The queries of every request for passages, in order."""
        return [body.get("queries") or body["query"] for body in self.asked]

    def then(self, *faults: Fault | None) -> None:
        """The next requests fail so, one after the other; later ones are answered."""
        left = list(faults)
        self.script = lambda query: left.pop(0) if left else None

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/retrieve", self._search_r1)
        app.router.add_post("/batch_search", self._flashrag)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/info", self._info)
        return app

    async def _search_r1(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        lists = [
            [{"document": document, "score": 1.0 - i} for i, document in enumerate(self._hits(query))]
            for query in asked["queries"]
        ]
        return await self._answer(request, asked, asked["queries"], {"result": lists})

    async def _flashrag(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        return await self._answer(request, asked, asked["query"], [self._hits(query) for query in asked["query"]])

    def _hits(self, query: str) -> list[dict[str, str]]:
        return [{"id": f"{query[:200]}#{i}", "contents": self.contents(query, i)} for i in range(self.hits)]

    async def _answer(
        self, request: web.Request, asked: dict[str, Any], queries: Sequence[str], good: Any
    ) -> web.StreamResponse:
        self.asked.append(asked)
        self.connections.add(request.transport)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            fault = next(filter(None, map(self.script, queries)), Fault())
            await asyncio.sleep(fault.after_s)
            if fault.until is not None:
                await fault.until.wait()
            if fault.hang:
                await asyncio.Event().wait()
            if fault.cut:
                return await _cut(request)
            body = good if fault.body is None else fault.body
            raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
            return web.Response(status=fault.status, body=raw, headers=fault.headers)
        finally:
            self._in_flight -= 1

    async def _ready(self, request: web.Request) -> web.Response:
        self.looks += 1
        if self.ready is None:
            raise web.HTTPNotFound
        return web.Response(status=200 if self.ready else 503)

    async def _info(self, request: web.Request) -> web.Response:
        if not self.fingerprint and not self.backend:
            raise web.HTTPNotFound
        return web.json_response({"fingerprint": self.fingerprint, "backend": self.backend})


async def _cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"result"')
    assert request.transport is not None
    request.transport.abort()
    return response


def canned_retriever(contents: str) -> FakeRetriever:
    """A retriever that answers every query with one passage of these contents (title line, newline, text)."""
    retriever = FakeRetriever(hits=1)
    retriever.contents = lambda query, i: contents
    return retriever
