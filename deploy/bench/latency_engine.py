"""An engine that takes its time and knows its lines: SGLang's routes over the drawn latencies, on a real socket.

`python -m deploy.bench.latency_engine SCRIPT PORT`. It decodes any number of requests together, each at its own pace,
as an engine that is never the bottleneck would: the tokens of a turn come evenly over the seconds drawn for it. A
request that brings part of the turn is continued at the same pace.

    loop       consumes   produces             waits for             unblocked by
    generate   a request  its turn, in chunks  the tokens' due time  the clock; a client that leaves
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from deploy.bench.script import Script

VERSION = "1.0"
LOGPROB = -0.25


class LatencyEngine:
    """Plays `script`: the tokens of a turn, spread over the time that was drawn for it."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.running = 0

    def app(self) -> web.Application:
        """The routes that the rollout side uses."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        for path in ("/health", "/ready", "/health_generate"):
            app.router.add_get(path, self._ok)
        app.router.add_post("/abort_request", self._ok)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        clock = asyncio.get_running_loop().time
        begun = clock()
        body = await request.json()
        place, ids = self._script.rest(body["input_ids"])
        whole = place.written + len(ids)
        pace_s = self._script.draws.decode_s(place.seed, place.trajectory, place.turn) / whole
        ids = ids[: body["sampling_params"]["max_new_tokens"]]
        self.running += 1
        try:
            if body.get("stream"):
                return await self._stream(request, body, ids, begun, pace_s)
            await asyncio.sleep(begun + pace_s * len(ids) - clock())
            return web.json_response(self._answer(body, ids, ended=True))
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], ids: Sequence[int], begun: float, pace_s: float
    ) -> web.StreamResponse:
        """Cumulative chunks, as SGLang sends them by default: the first token, every `stream_interval`, the end."""
        clock = asyncio.get_running_loop().time
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        interval = int(body["sampling_params"].get("stream_interval") or 1)
        for length in [*range(1, len(ids), interval), len(ids)]:
            await asyncio.sleep(begun + pace_s * length - clock())
            chunk = self._answer(body, ids[:length], ended=length == len(ids))
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _answer(self, body: dict[str, Any], ids: Sequence[int], *, ended: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]} if ended else None,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": VERSION,
            "output_token_logprobs": [[LOGPROB, i, None] for i in ids],
        }
        if ended:  # SGLang says it in the last chunk only
            meta["weight_versions"] = [{"version": VERSION, "start": 0, "end": len(ids)}]
        return {"text": "", "output_ids": list(ids), "meta_info": meta}

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": VERSION})

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"num_running_reqs": self.running, "num_waiting_reqs": 0, "token_usage": 0.0, "gen_throughput": 0.0}
        return web.json_response({"loads": [load]})


def main(argv: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    engine = LatencyEngine(Script.load(Path(argv[0])))
    web.run_app(
        engine.app(), host="127.0.0.1", port=int(argv[1]), access_log=None, print=None, handler_cancellation=True
    )


if __name__ == "__main__":
    main(sys.argv[1:])
