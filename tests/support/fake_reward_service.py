"""A small OpenAI-compatible service with scripted faults, for tests of rewards that call a service.

Embeddings are bags of words, so texts with the same words have cosine 1 and texts without a common one about 0. Its
judge finds an answer right when it equals an accepted one, whatever its case.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

from aiohttp import web

DIMENSIONS = 512


class FakeService:
    """`async with FakeService(faults) as service:` serves at `service.url` (`/v1` included).

    faults   one word for each of the first requests, "" for a sound one: a status ("500", "429", "400"), `hang`,
             `garbage` (not JSON), `count` (an embedding too few), `nan`, `zero`, or what the judge says, after `say:`
    delay_s  that each sound answer takes
    refuse   a text that embeddings answer with 400 whenever it is among the input
    """

    def __init__(self, faults: Sequence[str] = (), *, delay_s: float = 0.0, refuse: str | None = None) -> None:
        self._faults, self._delay_s, self._refuse = list(faults), delay_s, refuse
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        """Every request's body, in order."""
        self.keys: list[str] = []
        """Every request's Authorization header."""
        self.most_at_once = 0
        self._now = 0
        app = web.Application()
        app.add_routes([web.post("/v1/embeddings", self._embeddings), web.post("/v1/chat/completions", self._chat)])
        app.add_routes([web.post("/v1/reward", self._reward)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)

    async def __aenter__(self) -> FakeService:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _begin(self, request: web.Request) -> tuple[dict[str, Any], str]:
        """The body and this request's fault; raises the fault that is the same everywhere."""
        body = await request.json()
        fault = self._faults[len(self.bodies)] if len(self.bodies) < len(self._faults) else ""
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(3600 if fault == "hang" else self._delay_s)
        finally:
            self._now -= 1
        return body, fault

    async def _embeddings(self, request: web.Request) -> web.Response:
        body, fault = await self._begin(request)
        texts = body["input"]
        if fault.isdecimal() or self._refuse in texts:
            return web.Response(status=int(fault or 400), text="no")
        if fault == "garbage":
            return web.Response(text="<html>")
        rows = [_embed(text) for text in texts]
        if fault in ("nan", "zero"):
            rows[0] = [math.nan if fault == "nan" else 0.0] * DIMENSIONS
        # in an order of its own: the index says which text is meant
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in reversed(list(enumerate(rows)))]
        return web.Response(text=json.dumps({"object": "list", "data": data[: -1 if fault == "count" else None]}))

    async def _chat(self, request: web.Request) -> web.Response:
        body, fault = await self._begin(request)
        if fault.isdecimal():
            return web.Response(status=int(fault), text="no")
        if fault == "garbage":
            return web.Response(text="<html>")
        shown = json.loads(body["messages"][-1]["content"])
        right = shown["candidate_answer"].casefold() in [gold.casefold() for gold in shown["accepted_answers"]]
        said = json.dumps({"rationale": "it is what it is", "score": float(right)})
        said = fault.removeprefix("say:") if fault.startswith("say:") else said
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": said}}]})

    async def _reward(self, request: web.Request) -> web.Response:
        body, fault = await self._begin(request)
        if fault.isdecimal():
            return web.Response(status=int(fault), text="no")
        return web.json_response({"reward": min(100, len(body["outcome"]["answer"] or "")) / 100})


def _embed(text: str) -> list[float]:
    row = [0.0] * DIMENSIONS
    for word in text.casefold().split():
        row[zlib.crc32(word.encode()) % DIMENSIONS] += 1.0
    return row
