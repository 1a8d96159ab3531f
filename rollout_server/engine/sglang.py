"""Client of one engine that speaks SGLang's HTTP API, real SGLang or the embedded CPU engine: generation.

Answers are streamed, so that what an engine has sampled is here when it dies. Everything that can go wrong comes out
as an EngineError with a cause.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import suppress
from typing import Any

import aiohttp

from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from rollout_server.engine.call import Call
from rollout_server.engine.http import EngineHttp
from rollout_server.engine.received import Received
from rollout_server.engine.reply import cause_of_status
from rollout_server.engine.stream import Reader
from rollout_server.engine.turn import Turn

STREAM_INTERVAL = 8
"""Tokens between two chunks: what is lost at most when an engine dies."""
CONNECT_S = 5.0
LARGEST_ANSWER = 64 << 20
"""Bytes of an answer that is not a stream."""


class SglangClient:
    """One engine at `url`. `session` is shared and owned by the caller; `name` goes into errors and completions.

    adapter  name of the LoRA adapter that answers; "": the weights themselves
    key      its API key, where the environment holds none (`protocol.access.engine_key`)
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        name: str = "",
        adapter: str = "",
        stream_interval: int = STREAM_INTERVAL,
        key: str = "",
    ) -> None:
        self._http = EngineHttp(session, url, name=name, key=key)
        self.name = self._http.name
        self._adapter, self._stream_interval = adapter, stream_interval

    async def generate(
        self, request: GenerateRequest, *, version: str, timeout_s: float, vocab_size: int | None = None
    ) -> Completion:
        """One whole turn from this engine, or an EngineError. `version`: see `stream`."""
        received = Received(self.name, request.max_new_tokens, vocab_size=vocab_size, label=version)
        await self.stream(request, Call(received, timeout_s=timeout_s), version=version)
        turn = Turn(request)
        turn.add(received)
        completion = turn.completion()
        if completion is None:
            raise EngineError("bad_output", self.name, "the versions of its tokens are not known")
        return completion

    async def stream(self, request: GenerateRequest, call: Call, *, version: str) -> None:
        """Generate into `call.received`, until the turn ends or `call.enough`. Raises EngineError.

        version  label that keeps the prefix cache of this version apart

        Leaving (a limit, a cancellation) closes the connection, and the engine then aborts the request.
        """
        body, received = json.dumps(self._body(request, version)), call.received
        try:
            async with call:
                await self._exchange(body, call)
            return
        except EngineError as error:
            failure = error
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            failure = EngineError("unreachable", self.name, str(error))
        except (aiohttp.ClientError, OSError) as error:
            cause = "cut" if received.chunks else "unreachable"
            failure = EngineError(cause, self.name, f"{type(error).__name__}: {error}"[:500])
        if failure.cause == "bad_output" or not received.finish_reason:
            raise failure from None

    async def _exchange(self, body: str, call: Call) -> None:
        headers = self._http.open_headers | {"Content-Type": "application/json"}
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with self._http.session.post(
            self._http.url + "/generate", data=body, headers=headers, timeout=limits, allow_redirects=False
        ) as response:
            if response.status >= 400:
                said = (await response.content.read(2000)).decode(errors="replace")
                raise EngineError(cause_of_status(response.status), self.name, f"{response.status} {said[:500]}")
            if response.content_type == "text/event-stream":
                await self._read_events(response, call)
            elif response.content_type == "application/json":
                await self._read_whole(response, call.received)
            else:
                raise EngineError("bad_output", self.name, f"an answer of type {response.content_type[:100]}")

    async def _read_events(self, response: aiohttp.ClientResponse, call: Call) -> None:
        received = call.received
        reader = Reader(received)
        try:
            async for data in response.content.iter_any():
                reader.feed(data)
                call.heard()
                if call.enough is not None:
                    reader.settle()
                    if call.enough():
                        return
        except asyncio.CancelledError:
            with suppress(EngineError):  # a chunk that is not sound brings no tokens, and a cancellation goes first
                reader.settle()
            raise
        except aiohttp.ClientError:
            # of a connection that is lost aiohttp hands out no more, but what had come by then is here
            for data in response.content._buffer:
                reader.feed(data)
            reader.settle()
            raise
        reader.settle()
        if not received.finish_reason:
            raise EngineError("cut", self.name, f"no last chunk after {len(received.ids)} tokens")

    async def _read_whole(self, response: aiohttp.ClientResponse, received: Received) -> None:
        """The answer of an engine that does not stream."""
        if (response.content_length or 0) > LARGEST_ANSWER:
            raise EngineError("bad_output", self.name, f"an answer of {response.content_length} bytes")
        try:
            received.take(json.loads(await response.read()))
        except (ValueError, RecursionError) as error:
            raise EngineError("bad_output", self.name, f"not JSON: {str(error)[:200]}") from None
        if not received.finish_reason:
            raise EngineError("bad_output", self.name, "an answer without a finish reason")

    def _body(self, request: GenerateRequest, version: str) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(request.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "stream_interval": self._stream_interval,
        }
        if request.seed is not None:
            params["sampling_seed"] = request.seed
        body = {
            "input_ids": [int(i) for i in request.ids],
            "sampling_params": params,
            # the scheduler matches an abort's rid by prefix: only ids of one length are safe
            "rid": uuid.uuid4().hex,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "extra_key": version,
        }
        return body | {"lora_path": self._adapter} if self._adapter else body
