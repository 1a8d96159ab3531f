"""POST /generate: submit requests to the engine thread, and send the answer whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from protocol.runtime.timing import loop_timeout
from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.scheduler.engine import Engine
from rollout_server.cpu_engine.scheduler.request import Request
from rollout_server.cpu_engine.scheduler.scheduler import one_of
from rollout_server.cpu_engine.server.auth import problem
from rollout_server.cpu_engine.server.lora import LoraRoutes
from rollout_server.cpu_engine.server.response import StreamEncoder, answer
from rollout_server.cpu_engine.server.validation import (
    BadRequest,
    GenerateCall,
    Limits,
    Parsed,
    is_large,
    parse,
    read_json,
    unblocked,
)

LARGE_ANSWER = 1 << 15
"""Number of log-probs from which an answer is serialised in a thread instead of on the event loop."""

PROBE_S = 20.0
"""Seconds that a probe for one token waits while no layer is computed."""


class Inbox:
    """Progress of one call's requests: {number of the request: its output tokens so far}. Used on the loop only."""

    def __init__(self) -> None:
        self._news: dict[int, int] = {}
        self._waiting: asyncio.Future[None] | None = None

    def put(self, number: int, length: int) -> None:
        """Record progress. Replaces earlier progress of the request that was not taken."""
        self._news[number] = length
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> dict[int, int]:
        """Wait for progress, and return all of it."""
        if not self._news:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        news, self._news = self._news, {}
        return news


class Mailbox:
    """Messages from the engine thread, which calls `put` and `wake_loop`, to the event loop, in order.

    Messages are delivered with one wake-up: a wake-up is a system call that passes the GIL to the event loop, and one
    per token and request would cost more than generating the tokens.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[Inbox, int, int]] = deque()

    def put(self, inbox: Inbox, number: int, length: int) -> None:
        """Queue a message for the next `wake_loop`."""
        self._pending.append((inbox, number, length))

    def wake_loop(self) -> None:
        """Make the loop deliver the queued messages."""
        if self._pending:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._pending:
            inbox, number, length = self._pending.popleft()
            inbox.put(number, length)


class Generation:
    """The generation routes. `seed` determines the seeds of requests without one; None: at random."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        limits: Limits,
        adapters: LoraRoutes,
        seed: int | None,
        incremental: bool,
    ) -> None:
        self._engine, self._tokenizer, self._limits, self._incremental = engine, tokenizer, limits, incremental
        self._adapters = adapters
        self._next_seed = (secrets.randbits(32) if seed is None else seed & 0xFFFFFFFF) << 32
        self._live: set[str] = set()
        self._mailbox: Mailbox | None = None

    @property
    def label(self) -> str:
        """The engine's current weight version."""
        return self._engine.scheduler.version

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Handle SGLang's /generate."""
        body = await read_json(http)
        parsed = await unblocked(await is_large(http), lambda: parse(body, self._tokenizer, self._limits))
        with self.running(parsed) as (requests, inbox):
            if not parsed.stream:
                await self.ended(requests, inbox)
                return await self._whole(requests, parsed.single)
            streams = [
                StreamEncoder(
                    r, self._tokenizer, incremental=self._incremental, index=None if parsed.single else number
                )
                for number, r in enumerate(requests)
            ]
            return await self.send(http, requests, inbox, lambda n, *news: streams[n].chunk(*news, self.label))

    @contextmanager
    def running(self, parsed: Parsed) -> Iterator[tuple[list[Request], Inbox]]:
        """Run the requests of a body. Yields them and the inbox of their progress; aborts unfinished ones at exit.

        While memory is released they get 503 instead of waiting: it is resumed by tags, and a caller may forget one.
        """
        if released := self._engine.released:
            still = f"memory is released ({', '.join(sorted(released))}): POST /resume_memory_occupation"
            raise web.HTTPServiceUnavailable(reason=still)
        inbox = Inbox()
        requests = self._requests(parsed.calls, parsed.stream, inbox)
        names = {r.rid for r in requests}
        if names & self._live:
            raise BadRequest(f"rid {min(names & self._live)!r} is in use")
        self._live |= names
        self._engine.submit(requests)
        try:
            yield requests, inbox
        finally:
            self._live -= names
            # the client disconnected, or sending failed: abort the rest
            if any(r.finish is None for r in requests):
                self._engine.abort(one_of(requests))

    async def ended(self, requests: list[Request], inbox: Inbox) -> None:
        """Wait until all have ended. Without a stream, progress is reported only at the end."""
        ended: set[int] = set()
        while len(ended) < len(requests):
            ended.update(await inbox.take())

    async def probe(self) -> bool:
        """Return whether one token is generated before PROBE_S pass without a computed layer."""
        model, inbox = self._engine.scheduler.runner.model, Inbox()
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        requests = self._requests(parse(body, self._tokenizer, self._limits).calls, False, inbox)
        self._engine.submit(requests)
        before = -1
        try:
            while requests[0].finish is None and before != model.layers_done:
                before = model.layers_done
                with suppress(TimeoutError):
                    async with loop_timeout(PROBE_S):
                        await inbox.take()
        finally:
            if requests[0].finish is None:
                self._engine.abort(one_of(requests))
        finish = requests[0].finish
        return finish is not None and finish["type"] != "abort"

    def _requests(self, calls: list[GenerateCall], stream: bool, inbox: Inbox) -> list[Request]:
        mailbox, now = self._open_mailbox(), time.perf_counter()
        requests: list[Request] = []
        for call in calls:
            adapter = self._adapters.named(call.adapter)
            first: Request | None = None
            for sample, rid in enumerate(call.rids):
                number = len(requests)

                def notify(_: Request, length: int, number: int = number) -> None:
                    mailbox.put(inbox, number, length)

                room = min(self._limits.cache, self._limits.context) - len(call.ids)
                requests.append(
                    Request(
                        rid=rid,
                        prompt_ids=call.ids,
                        params=call.params,
                        seed=self._seed(call.params.sampling_seed, sample),
                        limit=min(call.params.max_new_tokens, room),
                        notify=notify,
                        stream_interval=(call.params.stream_interval or 1) if stream else 0,
                        return_logprob=call.return_logprob,
                        logprob_start=call.logprob_start,
                        top_logprobs=call.top_logprobs,
                        logprob_texts=call.logprob_texts,
                        extra_key=f"{adapter.number if adapter else ''}\0{call.extra_key}",  # the number has no NUL
                        adapter=adapter,
                        arrived=now,
                        first=first,
                    )
                )
                first = first or requests[-1]
        return requests

    def _open_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
            self._engine.scheduler.wake_loop = self._mailbox.wake_loop
        return self._mailbox

    def _seed(self, given: int | None, sample: int) -> int:
        if given is not None:
            return (given + sample) % (1 << 64)
        self._next_seed = (self._next_seed + 1) % (1 << 64)
        return self._next_seed

    async def _whole(self, requests: list[Request], single: bool) -> web.Response:
        if failed := failure(requests):
            return failed
        label = self.label

        def answers() -> object:
            found = [answer(r, self._tokenizer, label) for r in requests]
            return found[0] if single else found

        return await send_whole(requests, answers)

    async def send(
        self,
        http: web.Request,
        requests: list[Request],
        inbox: Inbox,
        chunk: Callable[[int, int, bool], bytes],
        last: Callable[[], bytes] = bytes,
    ) -> web.StreamResponse:
        """Send server-sent events: `chunk(number of the request, its tokens so far, ended)`, then `last()` and [DONE].

        Tokens that arrive while a chunk is being sent are part of the next chunk, so slow clients do not block others.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        live = set(range(len(requests)))
        while live:
            events = []
            for number, length in (await inbox.take()).items():
                request = requests[number]
                if number in live:
                    # it may have ended after this progress: then a later chunk reports the end
                    ended = request.finish is not None and length == len(request.output_ids)
                    events.append(chunk(number, length, ended))
                    live -= {number} if ended else set()
            if live:
                await response.write(b"".join(events))
            else:  # send the last chunk and the end in one write
                await response.write_eof(b"".join((*events, last(), b"data: [DONE]\n\n")))
        return response


async def send_whole(requests: list[Request], build: Callable[[], object]) -> web.Response:
    """Send the result of `build` for finished requests as JSON, in a thread if it has many log-probs."""
    held = sum((len(r.output_ids) + len(r.input_logprobs or ())) * (1 + r.top_logprobs) for r in requests)
    text = await unblocked(held > LARGE_ANSWER, lambda: json.dumps(build()))
    return web.Response(text=text, content_type="application/json")


def failure(requests: list[Request]) -> web.Response | None:
    """Return the error response if a request failed in the engine, else None."""
    for request in requests:
        finish = request.finish or {}
        if finish.get("status_code"):
            return problem(finish["status_code"], str(finish["message"]))
    return None
