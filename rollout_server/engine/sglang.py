"""Client of one engine that speaks SGLang's HTTP API, real SGLang or the embedded CPU engine: generation.

Everything that can go wrong comes out as an EngineError with a cause.
"""

from __future__ import annotations

import uuid
from typing import Any

import aiohttp

from rollout_server.engine.base import Completion, GenerateRequest
from rollout_server.engine.http import EngineHttp
from rollout_server.engine.reply import parse_completion


class SglangClient:
    """One engine at `url`. `session` is shared and owned by the caller; `name` goes into errors and completions."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, name: str = "") -> None:
        self._http = EngineHttp(session, url, name=name)
        self.name = self._http.name

    async def generate(
        self, request: GenerateRequest, *, version: str, timeout_s: float, vocab_size: int | None = None
    ) -> Completion:
        """One turn. `version`: label that keeps the prefix cache of this version apart. Raises EngineError.

        Leaving (a time-out, a cancellation) closes the connection, and the engine then aborts the request.
        """
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(request.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
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
            "stream": False,
            "extra_key": version,
        }
        reply = await self._http.call("POST", "/generate", body, timeout_s=timeout_s, headers=self._http.open_headers)
        return parse_completion(reply, engine=self.name, max_new_tokens=request.max_new_tokens, vocab_size=vocab_size)
