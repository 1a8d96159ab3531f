"""POST /generate: from a body to requests on the engine thread and back, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import web

from rollout_server.cpu_engine.access import problem
from rollout_server.cpu_engine.answer import answer
from rollout_server.cpu_engine.bodies import read_json
from rollout_server.cpu_engine.contract import BadRequest, Call, Limits, parse
from rollout_server.cpu_engine.engine import Engine
from rollout_server.cpu_engine.request import Request
from rollout_server.cpu_engine.scheduler import one_of
from rollout_server.cpu_engine.tokenizer import Tokenizer

Progress = tuple[int, int]
"""(which request of the call, its output tokens so far)."""


class Generation:
    """The generating routes. `seed` starts the seeds of requests that bring none."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, limits: Limits, seed: int) -> None:
        self._engine, self._tokenizer, self._limits = engine, tokenizer, limits
        self._next_seed = (seed & 0xFFFFFFFF) << 32
        self._live: set[str] = set()

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """SGLang's /generate."""
        parsed = parse(await read_json(http), self._tokenizer, self._limits)
        progress: asyncio.Queue[Progress] = asyncio.Queue()
        requests = self._requests(parsed.calls, parsed.stream, progress)
        names = {r.rid for r in requests}
        if names & self._live:
            raise BadRequest(f"rid {min(names & self._live)!r} is in use")
        self._live |= names
        self._engine.submit(requests)
        try:
            if parsed.stream:
                return await self._stream(http, requests, progress, parsed.single)
            for _ in requests:
                await progress.get()
            return self._whole(requests, parsed.single)
        finally:
            self._live -= names
            # the client went away, or sending failed: nobody will read the rest
            if any(r.finish is None for r in requests):
                self._engine.abort(one_of(requests))

    async def probe(self) -> bool:
        """Whether one token comes back within 20 seconds."""
        progress: asyncio.Queue[Progress] = asyncio.Queue()
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        requests = self._requests(parse(body, self._tokenizer, self._limits).calls, False, progress)
        self._engine.submit(requests)
        try:
            await asyncio.wait_for(progress.get(), 20)
        except TimeoutError:
            self._engine.abort(one_of(requests))
        finish = requests[0].finish
        return finish is not None and finish["type"] != "abort"

    def _requests(self, calls: list[Call], stream: bool, progress: asyncio.Queue[Progress]) -> list[Request]:
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        requests: list[Request] = []
        for call in calls:
            for attempt, rid in enumerate(call.rids):
                number = len(requests)

                def notify(_: Request, length: int, number: int = number) -> None:
                    loop.call_soon_threadsafe(progress.put_nowait, (number, length))

                room = min(self._limits.cache, self._limits.context) - len(call.ids)
                requests.append(
                    Request(
                        rid=rid,
                        prompt_ids=call.ids,
                        params=call.params,
                        seed=self._seed(call.params.sampling_seed, attempt),
                        limit=min(call.params.max_new_tokens, room),
                        notify=notify,
                        stream=stream,
                        return_logprob=call.return_logprob,
                        logprob_start=call.logprob_start,
                        top_logprobs=call.top_logprobs,
                        extra_key=call.extra_key,
                        arrived=now,
                    )
                )
        return requests

    def _seed(self, given: int | None, attempt: int) -> int:
        if given is not None:
            return (given + attempt) % (1 << 64)
        self._next_seed = (self._next_seed + 1) % (1 << 64)
        return self._next_seed

    def _answer(self, request: Request, length: int) -> dict[str, Any]:
        return answer(request, length, self._tokenizer, self._engine.scheduler.version)

    def _whole(self, requests: list[Request], single: bool) -> web.Response:
        for request in requests:
            status = (request.finish or {}).get("status_code")
            if status:
                return problem(status, str((request.finish or {})["message"]))
        answers = [self._answer(r, len(r.output_ids)) for r in requests]
        return web.Response(text=json.dumps(answers[0] if single else answers), content_type="application/json")

    async def _stream(
        self, http: web.Request, requests: list[Request], progress: asyncio.Queue[Progress], single: bool
    ) -> web.StreamResponse:
        """Cumulative chunks, one for each token; a batch's chunks carry `index`. Ends with [DONE]."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        open_requests = len(requests)
        while open_requests:
            number, length = await progress.get()
            request = requests[number]
            # tokens that came while the last chunk was sent go out together
            ended = request.finish is not None and length == len(request.output_ids)
            if ended or progress.empty() or len(requests) > 1:
                chunk = self._chunk(request, length, ended)
                if not single:
                    chunk["index"] = number
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            open_requests -= ended
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _chunk(self, request: Request, length: int, ended: bool) -> dict[str, Any]:
        chunk = self._answer(request, length)
        if not ended:  # it may have ended meanwhile: the last chunk says so
            chunk["meta_info"]["finish_reason"] = None
        return chunk
