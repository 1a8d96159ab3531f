"""POST /generate: from a body to requests on the engine thread and back, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from aiohttp import web

from rollout_server.cpu_engine.access import problem
from rollout_server.cpu_engine.adapters import Adapters
from rollout_server.cpu_engine.answer import answer
from rollout_server.cpu_engine.bodies import read_json
from rollout_server.cpu_engine.contract import BadRequest, Call, Limits, parse
from rollout_server.cpu_engine.engine import Engine
from rollout_server.cpu_engine.mailbox import Inbox, Mailbox
from rollout_server.cpu_engine.request import Request
from rollout_server.cpu_engine.scheduler import one_of
from rollout_server.cpu_engine.stream import Chunks
from rollout_server.cpu_engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Streaming:
    """How streams are sent: a chunk every `interval` tokens unless a request says otherwise, cumulative or not."""

    interval: int = 1
    incremental: bool = False


class Generation:
    """The generating routes. `seed` starts the seeds of requests that bring none."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        limits: Limits,
        adapters: Adapters,
        seed: int,
        streaming: Streaming,
    ) -> None:
        self._engine, self._tokenizer, self._limits, self._streaming = engine, tokenizer, limits, streaming
        self._adapters = adapters
        self._next_seed = (seed & 0xFFFFFFFF) << 32
        self._live: set[str] = set()
        self._mailbox: Mailbox | None = None

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """SGLang's /generate."""
        parsed = parse(await read_json(http), self._tokenizer, self._limits)
        inbox = Inbox()
        requests = self._requests(parsed.calls, parsed.stream, inbox)
        names = {r.rid for r in requests}
        if names & self._live:
            raise BadRequest(f"rid {min(names & self._live)!r} is in use")
        self._live |= names
        self._engine.submit(requests)
        try:
            if parsed.stream:
                return await self._stream(http, requests, inbox, parsed.single)
            ended: set[int] = set()
            while len(ended) < len(requests):  # without a stream there is news of a request only at its end
                ended.update(await inbox.take())
            return self._whole(requests, parsed.single)
        finally:
            self._live -= names
            # the client went away, or sending failed: nobody will read the rest
            if any(r.finish is None for r in requests):
                self._engine.abort(one_of(requests))

    async def probe(self) -> bool:
        """Whether one token comes back within 20 seconds."""
        inbox = Inbox()
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        requests = self._requests(parse(body, self._tokenizer, self._limits).calls, False, inbox)
        self._engine.submit(requests)
        try:
            await asyncio.wait_for(inbox.take(), 20)
        except TimeoutError:
            self._engine.abort(one_of(requests))
        finish = requests[0].finish
        return finish is not None and finish["type"] != "abort"

    def _requests(self, calls: list[Call], stream: bool, inbox: Inbox) -> list[Request]:
        mailbox, now = self._open_mailbox(), time.perf_counter()
        requests: list[Request] = []
        for call in calls:
            adapter = self._adapters.named(call.adapter)
            for attempt, rid in enumerate(call.rids):
                number = len(requests)

                def notify(_: Request, length: int, number: int = number) -> None:
                    mailbox.put(inbox, number, length)

                room = min(self._limits.cache, self._limits.context) - len(call.ids)
                requests.append(
                    Request(
                        rid=rid,
                        prompt_ids=call.ids,
                        params=call.params,
                        seed=self._seed(call.params.sampling_seed, attempt),
                        limit=min(call.params.max_new_tokens, room),
                        notify=notify,
                        stream_interval=(call.params.stream_interval or self._streaming.interval) if stream else 0,
                        return_logprob=call.return_logprob,
                        logprob_start=call.logprob_start,
                        top_logprobs=call.top_logprobs,
                        extra_key=f"{call.extra_key}\0{adapter.number}" if adapter else call.extra_key,
                        adapter=adapter,
                        arrived=now,
                    )
                )
        return requests

    def _open_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
            self._engine.scheduler.ring = self._mailbox.ring
        return self._mailbox

    def _seed(self, given: int | None, attempt: int) -> int:
        if given is not None:
            return (given + attempt) % (1 << 64)
        self._next_seed = (self._next_seed + 1) % (1 << 64)
        return self._next_seed

    def _whole(self, requests: list[Request], single: bool) -> web.Response:
        for request in requests:
            status = (request.finish or {}).get("status_code")
            if status:
                return problem(status, str((request.finish or {})["message"]))
        answers = [answer(r, self._tokenizer, self._engine.scheduler.version) for r in requests]
        return web.Response(text=json.dumps(answers[0] if single else answers), content_type="application/json")

    async def _stream(
        self, http: web.Request, requests: list[Request], inbox: Inbox, single: bool
    ) -> web.StreamResponse:
        """Chunks as server-sent events; a batch's carry `index`. Ends with [DONE].

        Tokens that come while a chunk is being sent go out together with the next: a slow client holds nobody up.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        streams = {
            number: Chunks(
                r, self._tokenizer, incremental=self._streaming.incremental, index=None if single else number
            )
            for number, r in enumerate(requests)
        }
        while streams:
            events = []
            for number, length in (await inbox.take()).items():
                request, ended = requests[number], False
                if number in streams:
                    # it may have ended after this news: then there is another, and that chunk says so
                    ended = request.finish is not None and length == len(request.output_ids)
                    events.append(streams[number].chunk(length, ended, self._engine.scheduler.version))
                if ended:
                    del streams[number]
            if streams:
                await response.write(b"".join(events))
            else:  # the last chunk and the end go out in one write
                await response.write_eof(b"".join((*events, b"data: [DONE]\n\n")))
        return response
