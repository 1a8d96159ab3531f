"""A simulated engine that writes a script: SGLang's routes over `BatchingEngine`, on a real socket.

    python -m benchmarks.rollout.latency_engine SCRIPT PORT INDEX

Steps follow the clock: a late step does not delay the next one, so a busy machine does not slow the engine down. Two
routes are for the benchmark: `/bench/down` closes all connections, accepts none for some seconds and clears the prefix
cache, like a crash and restart; `/bench/swap` pauses, clears the prefix cache and resumes with another version, like a
weight update.

    loop       consumes           produces             waits for              unblocked by
    steps      queued requests    tokens               a step's seconds       the clock; a request
    generate   a request          its turn, in chunks  the steps that it needs  steps; a client that leaves
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.rollout.batching import BatchingEngine, Decoding
from benchmarks.rollout.script import Script

LOGPROB = -0.25
FIRST_VERSION = "1.0"


class Streamed(Decoding):
    """A request whose tokens are streamed to a client.

    due    set when a chunk may be written, or when the request was dropped
    shown  tokens whose step is over, which the client may receive
    spans  (version, first token) of each version that wrote some of its tokens
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], interval: int, version: str) -> None:
        super().__init__(prompt, output)
        self.interval, self.spans = interval, [(version, 0)]
        self.due, self.shown, self.cut = asyncio.Event(), 0, False

    @property
    def ended(self) -> bool:
        return self.shown == len(self.output)


class LatencyEngine:
    """Play `script` at the speed of its engine `index`."""

    def __init__(self, script: Script, index: int) -> None:
        self._script = script
        self._engine = BatchingEngine(script.speeds[index])
        self._work = asyncio.Event()
        self._version = FIRST_VERSION
        self._down_until = self._paused_until = 0.0

    def app(self) -> web.Application:
        """Return the application, with the routes of the rollout side and the two of the benchmark."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        for path in ("/health", "/ready", "/health_generate"):
            app.router.add_get(path, self._ok)
        app.router.add_post("/abort_request", self._ok)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/bench/down", self._down)
        app.router.add_post("/bench/swap", self._swap)
        app.cleanup_ctx.append(self._stepping)
        return app

    async def _stepping(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._steps())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _steps(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            if not self._engine.busy:
                self._work.clear()
                await self._work.wait()
                due = clock()
            if self._paused_until > due:
                due = self._paused_until
                await asyncio.sleep(due - clock())
            seconds, advanced = self._engine.step()
            due += seconds
            await asyncio.sleep(due - clock())
            for request in advanced:
                assert isinstance(request, Streamed)
                request.shown = request.written
                if request.ended or (request.shown - 1) % request.interval == 0:
                    request.due.set()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        """Stream cumulative chunks like SGLang: after the first token, every `stream_interval` tokens, at the end."""
        self._refuse_while_down(http)
        body = await http.json()
        params = body["sampling_params"]
        place, ids = self._script.rest(body["input_ids"])
        interval = int(params.get("stream_interval") or 1)
        request = Streamed(body["input_ids"], ids[: params["max_new_tokens"]], interval, self._version)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        sent = 0
        self._engine.add(request)
        self._work.set()
        try:
            await response.prepare(http)
            while sent < len(request.output):
                await request.due.wait()
                request.due.clear()
                if request.cut:
                    return _hang_up(http, response)
                sent = request.shown
                await response.write(b"data: " + json.dumps(self._chunk(body, request)).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        finally:
            self._engine.drop(request)
            if place.first and sent < len(request.output):
                self._script.release(place, sent=sent > 0)

    def _chunk(self, body: dict[str, Any], request: Streamed) -> dict[str, Any]:
        ids = request.output[: request.shown]
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]} if request.ended else None,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(ids),
            "cached_tokens": request.cached,
            "weight_version": request.spans[-1][0],
            "output_token_logprobs": [[LOGPROB, i, None] for i in ids],
        }
        if request.ended:  # SGLang sends it in the last chunk only
            ends = [start for _, start in request.spans[1:]] + [len(ids)]
            meta["weight_versions"] = [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(request.spans, ends, strict=True)
                if start < end
            ]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def _down(self, http: web.Request) -> web.Response:
        seconds = float((await http.json())["seconds"])
        self._down_until = asyncio.get_running_loop().time() + seconds
        self._engine.cache.clear()
        for request in [*self._engine.running, *self._engine.waiting]:
            assert isinstance(request, Streamed)
            self._engine.drop(request)
            request.cut = True
            request.due.set()
        return web.Response(text="ok\n")

    async def _swap(self, http: web.Request) -> web.Response:
        """Pause for an update; answer when the pause is over."""
        body = await http.json()
        self._version = str(body["version"])
        self._paused_until = asyncio.get_running_loop().time() + float(body["seconds"])
        self._engine.cache.clear()
        for request in [*self._engine.running, *self._engine.waiting]:
            assert isinstance(request, Streamed)
            request.spans.append((self._version, request.shown))
        await asyncio.sleep(float(body["seconds"]))
        return web.Response(text="ok\n")

    def _refuse_while_down(self, http: web.Request) -> None:
        if asyncio.get_running_loop().time() < self._down_until:
            if http.transport is not None:
                http.transport.abort()
            raise web.HTTPServiceUnavailable()

    async def _ok(self, http: web.Request) -> web.Response:
        self._refuse_while_down(http)
        return web.Response(text="ok\n")

    async def _model_info(self, http: web.Request) -> web.Response:
        self._refuse_while_down(http)
        return web.json_response({"weight_version": self._version})

    async def _loads(self, http: web.Request) -> web.Response:
        self._refuse_while_down(http)
        engine = self._engine
        load = {
            "num_running_reqs": len(engine.running),
            "num_waiting_reqs": len(engine.waiting),
            "token_usage": min(1.0, engine.held_tokens / engine.speed.cache_tokens),
            "gen_throughput": 0.0,
            "max_running_requests": engine.speed.max_running,
            "max_total_num_tokens": engine.speed.cache_tokens,
        }
        return web.json_response({"loads": [load]})


def _hang_up(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if http.transport is not None:
        http.transport.close()
    return response


def main(argv: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    engine = LatencyEngine(Script.load(Path(argv[0])), int(argv[2]))
    web.run_app(
        engine.app(), host="127.0.0.1", port=int(argv[1]), access_log=None, print=None, handler_cancellation=True
    )


if __name__ == "__main__":
    main(sys.argv[1:])
