"""A scripted engine: answers with given tokens, latencies and faults. For tests, benchmarks of the rollout loop and dry
runs without a model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from protocol.messages import VersionSpan
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from tests.support.scripted_server import ScriptedServer

FIRST = PolicyVersion(1, 0)


@dataclass(frozen=True)
class Play:
    """One scripted turn.

    ids            what is sampled; cut to the request's limit, and then the turn ends by "length"
    logprobs       one an id; empty: -0.5 each
    spans          policy versions that cover the ids; empty: all of `version`
    error          cause of the EngineError that is raised in place of a completion
    latency_s      seconds until either
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    spans: tuple[VersionSpan, ...] = ()
    version: PolicyVersion = FIRST
    finish_reason: str = "stop"
    matched: str | int | None = None
    error: str = ""
    latency_s: float = 0.0


Script = Callable[[GenerateRequest, int], Play]
"""What to play for a request; the number counts the requests of its session from 0."""


class FakeEngine:
    """A `Generate` that follows a script. `requests` holds every request in the order of arrival."""

    def __init__(self, script: Script, *, name: str = "fake") -> None:
        self._script = script
        self._name = name
        self._turns: Counter[str] = Counter()
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> Completion:
        turn = self._turns[request.session]
        self._turns[request.session] += 1
        self.requests.append(request)
        play = self._script(request, turn)
        if play.latency_s:
            await asyncio.sleep(play.latency_s)
        if play.error:
            raise EngineError(play.error, self._name, "scripted")
        ids = list(play.ids)[: request.max_new_tokens]
        whole = len(ids) == len(play.ids)
        logprobs = list(play.logprobs)[: len(ids)] if play.logprobs else [-0.5] * len(ids)
        return Completion(
            ids=ids,
            logprobs=logprobs,
            spans=_cut(play.spans, len(ids)) if play.spans else _all_of(play.version, len(ids)),
            finish_reason=play.finish_reason if whole else "length",
            matched=play.matched if whole else None,
            engine=self._name,
        )


def in_turn(*plays: Play) -> Script:
    """Every session plays these turns in order; one request more is a fault of the test and raises IndexError."""
    return lambda request, turn: plays[turn]


def _all_of(version: PolicyVersion, count: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(epoch=version.epoch, step=version.step, start=0, end=count),) if count else ()


def _cut(spans: tuple[VersionSpan, ...], count: int) -> tuple[VersionSpan, ...]:
    return tuple(s.model_copy(update={"end": min(s.end, count)}) for s in spans if s.start < count)


# A scripted engine behind a real socket: the routes of SGLang that we use, with faults on demand. For tests.
#
# Its output is a pure function of its input (`next_ids`). So any engine that continues a trajectory, within a turn or
# between two, must produce the same tokens: a lost or duplicate token shows.

VOCAB = 1000


def next_ids(ids: Sequence[int], count: int) -> list[int]:
    """`count` ids in [0, VOCAB) that follow from `ids` alone."""
    seen = list(ids)
    for _ in range(count):
        seen.append((31 * sum(seen[-8:]) + 7 * len(seen)) % VOCAB)
    return seen[len(ids) :]


def unsaid(turn: Sequence[int], ids: Sequence[int]) -> list[int]:
    """What is left of a `turn` whose beginning stands at the end of `ids`: for scripts that may be continued."""
    for said in range(min(len(turn) - 1, len(ids)), 0, -1):
        if list(ids[-said:]) == list(turn[:said]):
            return list(turn[said:])
    return list(turn)


@dataclass
class Fault:
    """What a route does instead: hang for ever, drop the connection, answer `status`, or `body` (`raw`: its bytes, of
    `content_type`); -1 times: always.

    after  /generate, streamed: after this many correct tokens. Then `raw` is sent between events,
           and `spoil` changes what every further chunk says.
    """

    hang: bool = False
    drop: bool = False
    status: int = 0
    body: Any = None
    times: int = -1
    after: int | None = None
    raw: bytes = b""
    content_type: str = "text/plain"
    spoil: Callable[[dict[str, Any]], Any] | None = None


Say = Callable[[dict[str, Any]], Sequence[int]]
"""Ids to answer a /generate body with; the turn ends by "stop" when fewer than max_new_tokens."""


def _eight(body: dict[str, Any]) -> Sequence[int]:
    return next_ids(body["input_ids"], min(8, body["sampling_params"]["max_new_tokens"]))


@dataclass
class Generation:
    """A request that is being answered. `labels`: the version of each token that is there."""

    body: dict[str, Any]
    ids: Sequence[int]
    labels: list[str] = field(default_factory=list)

    def chunk(self, label: str, *, start: int = 0, exact: bool) -> dict[str, Any]:
        """Return SGLang's meta_info for the tokens from `start`. exact: with version spans, as in the last chunk."""
        n = len(self.labels)
        whole = n == len(self.ids)
        stopped = n < self.body["sampling_params"]["max_new_tokens"]
        finish = {"type": "stop", "matched": None} if stopped else {"type": "length", "length": n}
        meta: dict[str, Any] = {
            "id": self.body["rid"],
            "finish_reason": finish if whole else None,
            "prompt_tokens": len(self.body["input_ids"]),
            "weight_version": label,
            "completion_tokens": n,
            "output_token_logprobs": [[-0.25, i, None] for i in self.ids[start:n]],
        }
        if exact or whole:
            starts = [k for k in range(n) if k == 0 or self.labels[k] != self.labels[k - 1]]
            meta["weight_versions"] = [
                {"version": self.labels[a], "start": a, "end": b} for a, b in zip(starts, [*starts[1:], n], strict=True)
            ]
        return {"text": "", "output_ids": list(self.ids[start:n]), "meta_info": meta}


class FakeServer(ScriptedServer):
    """`async with FakeServer() as engine: engine.url ...`. `calls` holds every route in order, `requests` each body;
    `tokens_made` counts what it has streamed.

    latency_s    before the first token; this and the next may be changed at any time
    pace_s       for each further one
    incremental  chunks hold only what is new, as with SGLang's --incremental-streaming-output
    exact        every chunk says which version sampled which token, as the CPU engine's do; SGLang's: the last
    """

    def __init__(
        self,
        say: Say = _eight,
        *,
        version: str = "default",
        latency_s: float = 0.0,
        pace_s: float = 0.0,
        incremental: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self._say, self.latency_s, self.pace_s = say, latency_s, pace_s
        self._incremental, self._exact = incremental, exact
        self.version, self.loaded = version, ""
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.tokens_made = 0
        self.adapters: dict[str, str] = {}
        self.faults: dict[str, Fault] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._in_flight = 0

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._faulty], client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health_generate", self._generates)
        app.router.add_get("/ready", self._generates)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/flush_cache", self._ok)
        app.router.add_post("/abort_request", self._ok)
        return app

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("policy", *self.adapters)]})

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        fault = self.faults.get(request.path)
        if fault is None or fault.times == 0 or fault.after is not None:
            return await handler(request)  # type: ignore[no-any-return]
        fault.times -= 1
        await self._misbehave(request, fault)
        if fault.status:
            return web.json_response({"error": "scripted"}, status=fault.status)
        if fault.raw:
            return web.Response(body=fault.raw, content_type=fault.content_type)
        return web.json_response(fault.body)

    async def _misbehave(self, request: web.Request, fault: Fault) -> None:
        if fault.hang:
            await asyncio.Event().wait()
        if fault.drop:
            assert request.transport is not None
            request.transport.close()
            await asyncio.Event().wait()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        generation = Generation(body, [int(i) for i in self._say(body)])
        self._in_flight += 1
        try:
            await asyncio.sleep(self.latency_s)
            await self._running.wait()
            if body.get("stream"):
                return await self._stream(request, generation)
            await asyncio.sleep(self.pace_s * len(generation.ids))
            generation.labels = [self.version] * len(generation.ids)
            return web.json_response(generation.chunk(self.version, exact=True))
        finally:
            self._in_flight -= 1

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        """A chunk after 1, n + 1, 2 n + 1, ... tokens for a stream_interval of n, as SGLang does it, and at the end."""
        fault = self.faults.get("/generate")
        after = fault.after if fault is not None and fault.times != 0 else None
        if fault is not None and after is not None:
            fault.times -= 1
        interval = generation.body["sampling_params"].get("stream_interval") or 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        for n in range(len(generation.ids) + 1):
            if n:
                await asyncio.sleep(self.pace_s if n > 1 else 0.0)
                await self._running.wait()
                generation.labels.append(self.version)
                self.tokens_made += 1
            last = n == len(generation.ids)
            due = last or n == after or n % interval == 1 % interval
            if n and due:
                start, sent = (sent if self._incremental else 0), n
                chunk: Any = generation.chunk(self.version, start=start, exact=self._exact)
                if fault is not None and after is not None and n > after and fault.spoil:
                    chunk = fault.spoil(chunk)
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if fault is not None and n == after:
                await self._misbehave(request, fault)
                await response.write(fault.raw)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _generates(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n") if self._running.is_set() else web.Response(status=503, text="paused\n")

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"num_running_reqs": self._in_flight, "num_waiting_reqs": 0, "token_usage": 0.0, "gen_throughput": 0.0}
        return web.json_response({"loads": [load]})

    async def _pause(self, _: web.Request) -> web.Response:
        self._running.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.version, self.loaded = body["weight_version"], body["model_path"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})
