"""Generation client for one engine with SGLang's HTTP API: SGLang or the CPU engine.

Answers are streamed, so that the sampled tokens are kept when an engine fails. Every failure is an EngineError with a
cause.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import aiohttp

from protocol.runtime.http.body import AnswerTooLarge, parse_json, read_bounded, read_start
from protocol.runtime.net import lacks_files
from protocol.runtime.timing import PATIENCE, LoopTimer, loop_timeout
from rollout_server.engine.base import TOO_MANY_FILES, Completion, EngineError, GenerateRequest
from rollout_server.engine.continuation import TurnAssembler
from rollout_server.engine.decoding import LONGEST_LINE, ReceivedTokens, StreamDecoder, cause_of_status

GRACE_S = 1.0
"""Timeout for the end of a stream whose last chunk has arrived, in seconds."""
RECHECK_S = 1.0
"""Interval at which a stalled engine that may pause is checked again, in seconds."""

API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "FORAY_ENGINE_API_KEY", "FORAY_ENGINE_ADMIN_KEY"
CONTROL_TIMEOUT_S = 30.0
"""Timeout of a control call that does not compute, in seconds. For an engine with slow steps a node sets more."""
STREAM_INTERVAL = 8
"""Tokens per chunk: the maximum that is lost when an engine fails."""
LARGEST_ANSWER = LONGEST_LINE
"""Maximum bytes of an answer that is not a stream."""


def _never() -> bool:
    return False


def _unknown() -> float:
    return 0.0


class EngineCall:
    """One request at one engine while it runs: `async with call:` around it.

    Ends the request with an EngineError when a limit is reached, or on `abort`. The limits do not count the time in
    which this process stood still (`LoopClock`).

    received    owned by the caller: keeps the tokens however the call ends
    timeout_s   for the whole call
    stall_s     between two chunks of the answer, after the first
    pace_s      returns the seconds of a recent slow step of the engine, 0 if unknown. A call takes at least as many
                steps as it has tokens, and a chunk `interval`: both limits are at least PATIENCE times that
    interval    tokens per chunk
    may_pause   returns whether the engine has a reason to be silent (it loads weights); then it is not a stall
    should_end  called after each chunk: True ends the call at once, without an error
    """

    def __init__(
        self,
        received: ReceivedTokens,
        *,
        timeout_s: float,
        stall_s: float = math.inf,
        pace_s: Callable[[], float] = _unknown,
        interval: int = STREAM_INTERVAL,
        may_pause: Callable[[], bool] = _never,
        should_end: Callable[[], bool] | None = None,
    ) -> None:
        self.received, self.should_end = received, should_end
        self._timeout_s, self._stall_s, self._may_pause = timeout_s, stall_s, may_pause
        self._pace_s, self._interval = pace_s, interval
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._timer = LoopTimer(self._check_limits)
        self._now = self._timer.clock.time
        self._began_at = self._heard_at = math.inf
        """Times of the `LoopClock`; `_heard_at`: of the last chunk, of the start before the first."""
        self.first_data_at, self.last_data_at = math.inf, -math.inf
        """Arrival times of the first and the last chunk, by the loop's clock."""
        self._why: EngineError | None = None
        self._open = False
        self.decoder: StreamDecoder | None = None
        """Decodes the answer; None before it starts."""

    def abort(self, cause: str, detail: str) -> None:
        """End the call with this error. Has no effect if it has already ended."""
        if self._open:
            self._open = False
            self._why = EngineError(cause, self.received.engine, detail)
            self._scope.reschedule(self._loop.time())

    @property
    def silent_s(self) -> float:
        """Seconds since the last chunk, or since the start, without the time in which this process stood still."""
        return self._now() - self._heard_at

    def tokens_so_far(self) -> list[int]:
        """Decode what has arrived, and return its tokens. Malformed data ends the call, as it would later."""
        if self.decoder is not None and self._open:
            try:
                self.decoder.flush()
            except EngineError as error:
                self.abort(error.cause, error.detail)
        return self.received.ids

    def on_data(self) -> None:
        """Record that a chunk has arrived."""
        if self.last_data_at == -math.inf and self._stall_s < self._timeout_s:
            self._timer.arm(self._stall_s)
        self.last_data_at, self._heard_at = self._loop.time(), self._now()
        self.first_data_at = min(self.first_data_at, self.last_data_at)
        if self.received.finish_reason and self._stall_s > GRACE_S:
            self._stall_s = GRACE_S
            self._timer.arm(GRACE_S)

    async def __aenter__(self) -> EngineCall:
        await self._scope.__aenter__()
        self._open = True
        self._timer.arm(self._timeout_s)
        self._began_at = self._heard_at = self._now()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._timer.cancel()
        scope = self._scope
        # the timer refers to this call, and the scope to the task: its result would stay until a garbage collection
        del self._timer, self._scope
        try:
            await scope.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._why is None:
                raise
            raise self._why from None

    def _check_limits(self) -> None:
        """End the call if a limit has been reached; otherwise schedule the next check."""
        now, slow_s = self._now(), PATIENCE * self._pace_s()
        timeout_s = max(self._timeout_s, slow_s * self.received.limit)
        ends = self.received.finish_reason  # what is left needs no step
        stall_s = self._stall_s if ends else max(self._stall_s, slow_s * self._interval)
        deadline = self._began_at + timeout_s
        if now >= deadline:
            self.abort("timeout", f"not finished within {timeout_s:g} s, after {len(self.received.ids)} tokens")
            return
        due = self._heard_at + stall_s if self.last_data_at > -math.inf else deadline
        if now >= due:
            if not self._may_pause():
                self.abort("stalled", f"silent for {stall_s:g} s after {len(self.received.ids)} tokens")
                return
            self.last_data_at, self._heard_at = self._loop.time(), now  # it gets the full stall_s when it continues
            due = now + RECHECK_S
        # not later than without the slow steps: they may be over
        self._timer.arm(max(0.0, min(due, deadline, now + self._stall_s) - now))


class EngineHttp:
    """HTTP calls to the engine at `url`, with a timeout, and with every failure as an EngineError.

    SGLang with `--admin-api-key` requires that key for control calls, and `--api-key` for all others. Both come from
    the environment, or from the node that launched the engine (`node/process.py`).

    session  a `bounded_session`, owned by the caller
    name     appears in errors
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, *, name: str = "", key: str = "") -> None:
        self.session, self.url, self.name = session, url.rstrip("/"), name or url
        self.control_s = CONTROL_TIMEOUT_S
        self.use_keys(os.environ.get(API_KEY_VARIABLE, "") or key, os.environ.get(ADMIN_KEY_VARIABLE, ""))

    def use_keys(self, api_key: str, admin_key: str) -> None:
        """Set the keys of later calls, "" for none. Without an admin key, control calls use the API key."""
        self.open_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.admin_headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else self.open_headers

    async def control(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 0.0) -> Any:
        """Call a route that requires the admin key, within timeout_s, by default control_s.

        Return the decoded JSON, or the text if the answer is not JSON.
        """
        return await self.call(method, path, body, timeout_s=timeout_s or self.control_s, headers=self.admin_headers)

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float,
        headers: dict[str, str],
        parse: bool = True,
    ) -> Any:
        """Send one request and return its whole answer, within timeout_s. Raises EngineError."""
        try:
            async with (
                loop_timeout(timeout_s),
                self.session.request(
                    method, self.url + path, json=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                if response.status >= 400:
                    cause = "http_500" if response.status >= 500 else "refused"
                    raise EngineError(cause, self.name, f"{path}: {response.status} {await read_start(response, 500)}")
                return await _content(response) if parse else None
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise EngineError(_cause_of_refusal(error), self.name, f"{path}: {error}") from None
        except TimeoutError:
            raise EngineError("timeout", self.name, f"{path}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError("unreachable", self.name, f"{path}: {type(error).__name__}: {error}") from None
        except (AnswerTooLarge, ValueError) as error:
            raise EngineError("bad_output", self.name, f"{path}: unusable answer: {str(error)[:200]}") from None


async def _content(response: aiohttp.ClientResponse) -> Any:
    raw = await read_bounded(response, LARGEST_ANSWER)
    # flush_cache, pause, abort and metrics answer with plain text or an empty body
    return parse_json(raw) if response.content_type == "application/json" else raw.decode(errors="replace")


def _cause_of_refusal(error: OSError) -> str:
    return TOO_MANY_FILES if lacks_files(error) else "unreachable"


def json_object(reply: Any, name: str) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise EngineError("bad_output", name, f"expected a JSON object, got {type(reply).__name__}")
    return reply


class SglangClient:
    """One engine at `url`. The caller owns `session` (`bounded_session`); `name` appears in errors and completions.

    adapter  name of the LoRA adapter to generate with; "": the base weights
    key      its API key, if the environment has none (`protocol.runtime.http.auth.engine_key`)
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
        """Generate one whole turn. Raises EngineError. `version`: see `stream`."""
        received = ReceivedTokens(self.name, request.max_new_tokens, vocab_size=vocab_size, label=version)
        await self.stream(request, EngineCall(received, timeout_s=timeout_s), version=version)
        turn = TurnAssembler(request)
        turn.add(received)
        completion = turn.completion()
        if completion is None:
            raise EngineError("bad_output", self.name, "it does not report the versions of its tokens")
        return completion

    async def stream(self, request: GenerateRequest, call: EngineCall, *, version: str) -> None:
        """Generate into `call.received`, until the turn ends or `call.should_end`. Raises EngineError.

        version  label that separates the prefix cache of this version from others

        An early end (a limit, a cancellation) closes the connection, and the engine then aborts the request.
        """
        body, received = json.dumps(self._body(request, version)), call.received
        try:
            async with call:
                await self._exchange(body, call)
            return
        except EngineError as error:
            failure = error
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            failure = EngineError(_cause_of_refusal(error), self.name, str(error))
        except (aiohttp.ClientError, OSError) as error:
            cause = "cut" if received.chunks else "unreachable"
            failure = EngineError(cause, self.name, f"{type(error).__name__}: {error}"[:500])
        if failure.cause == "bad_output" or not received.finish_reason:
            raise failure from None

    async def _exchange(self, body: str, call: EngineCall) -> None:
        headers = self._http.open_headers | {"Content-Type": "application/json"}
        async with self._http.session.post(
            self._http.url + "/generate", data=body, headers=headers, allow_redirects=False
        ) as response:
            if response.status >= 400:
                said = await read_start(response, 500)
                raise EngineError(cause_of_status(response.status), self.name, f"{response.status} {said}")
            if response.content_type == "text/event-stream":
                await self._read_events(response, call)
            elif response.content_type == "application/json":
                await self._read_whole(response, call.received)
            else:
                raise EngineError("bad_output", self.name, f"unexpected content type {response.content_type[:100]}")

    async def _read_events(self, response: aiohttp.ClientResponse, call: EngineCall) -> None:
        received = call.received
        decoder = call.decoder = StreamDecoder(received)
        try:
            async for data in response.content.iter_any():
                decoder.feed(data)
                call.on_data()
                if call.should_end is not None:
                    decoder.flush()
                    if call.should_end():
                        return
        except asyncio.CancelledError:
            with suppress(EngineError):  # an invalid chunk adds no tokens, and a cancellation takes precedence
                decoder.flush()
            raise
        except aiohttp.ClientError:
            # after a lost connection aiohttp delivers no more data; the received tokens are kept
            for data in response.content._buffer:
                decoder.feed(data)
            decoder.flush()
            raise
        decoder.flush()
        if not received.finish_reason:
            raise EngineError("cut", self.name, f"the stream ended early, after {len(received.ids)} tokens")

    async def _read_whole(self, response: aiohttp.ClientResponse, received: ReceivedTokens) -> None:
        """Read the answer of an engine that does not stream."""
        try:
            received.take(parse_json(await read_bounded(response, LARGEST_ANSWER)))
        except (AnswerTooLarge, ValueError) as error:
            raise EngineError("bad_output", self.name, f"unusable answer: {str(error)[:200]}") from None
        if not received.finish_reason:
            raise EngineError("bad_output", self.name, "the answer has no finish reason")

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
            # the scheduler matches the rid of an abort by prefix: only ids of equal length are safe
            "rid": uuid.uuid4().hex,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "extra_key": version,
        }
        return body | {"lora_path": self._adapter} if self._adapter else body
