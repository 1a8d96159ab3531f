"""Client of one engine that speaks SGLang's HTTP API: real SGLang or the embedded CPU engine.

Everything that can go wrong comes out as an EngineError with a cause. Keys come from the environment: SGLang with
`--admin-api-key` wants that key for control, and `--api-key` for everything else.
"""

from __future__ import annotations

import os
import uuid
from typing import Any, Literal

import aiohttp

from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from rollout_server.engine.reply import parse_completion

API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "FORAY_ENGINE_API_KEY", "FORAY_ENGINE_ADMIN_KEY"

CONTROL_TIMEOUT_S = 30.0
"""Deadline of a control call that computes nothing."""


class SglangClient:
    """One engine at `url`. `session` is shared and owned by the caller; `name` goes into errors and completions."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, name: str = "") -> None:
        self._session, self.url, self.name = session, url.rstrip("/"), name or url
        key = os.environ.get(API_KEY_VARIABLE, "")
        self._open = {"Authorization": f"Bearer {key}"} if key else {}
        admin = os.environ.get(ADMIN_KEY_VARIABLE, "") or key
        self._admin = {"Authorization": f"Bearer {admin}"} if admin else {}

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
        reply = await self._call("POST", "/generate", body, timeout_s=timeout_s, headers=self._open)
        return parse_completion(reply, engine=self.name, max_new_tokens=request.max_new_tokens, vocab_size=vocab_size)

    async def health(self, *, timeout_s: float) -> None:
        """Raises EngineError unless the engine has just generated a token: a live HTTP port alone proves nothing."""
        await self._call("GET", "/health_generate", None, timeout_s=timeout_s, headers=self._open, parse=False)

    async def version(self) -> PolicyVersion | None:
        """The policy version that the engine says it holds; None for a label that is not ours."""
        info = await self.model_info()
        return PolicyVersion.parse(str(info.get("weight_version", "")))

    async def model_info(self) -> dict[str, Any]:
        """`GET /model_info`: answers at once even while the engine is paused."""
        return _object(await self._control("GET", "/model_info"), self.name)

    async def loads(self) -> dict[str, float]:
        """`GET /v1/loads`, summed over data-parallel ranks: running, waiting, tokens_per_s, token_usage."""
        reply = _object(await self._control("GET", "/v1/loads"), self.name)
        ranks = reply.get("loads") or [reply]
        names = {
            "running": "num_running_reqs",
            "waiting": "num_waiting_reqs",
            "tokens_per_s": "gen_throughput",
            "token_usage": "token_usage",
        }
        try:
            out = {ours: float(sum(rank.get(theirs) or 0 for rank in ranks)) for ours, theirs in names.items()}
        except (TypeError, AttributeError) as error:
            raise EngineError("bad_output", self.name, f"/v1/loads: {error}") from None
        return out | {"token_usage": out["token_usage"] / len(ranks)}

    async def pause(self, mode: Literal["retract", "in_place", "abort"]) -> None:
        """Hold every request: `retract` requeues them, so that no key or value of the old version survives."""
        await self._control("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """`POST /continue_generation`: requests that were held, or came meanwhile, go on."""
        await self._control("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Forget every cached prefix."""
        await self._control("POST", "/flush_cache")

    async def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort the request `rid`, or all of them; the engine answers the same for ids it does not know."""
        await self._control("POST", "/abort_request", {"rid": rid, "abort_all": everything})

    async def update_weights_from_disk(self, path: str, *, label: str, flush: bool, timeout_s: float) -> None:
        """Load the directory `path` and call it `label`. Raises EngineError; the weights may then be half changed."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush, "abort_all_requests": False}
        reply = _object(await self._control("POST", "/update_weights_from_disk", body, timeout_s), self.name)
        if reply.get("success") is not True:
            raise EngineError("refused", self.name, str(reply.get("message", "update failed"))[:500])

    async def _control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        return await self._call(method, path, body, timeout_s=timeout_s, headers=self._admin)

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float,
        headers: dict[str, str],
        parse: bool = True,
    ) -> Any:
        deadline = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(5.0, timeout_s))
        try:
            async with self._session.request(
                method, self.url + path, json=body, headers=headers, timeout=deadline
            ) as response:
                if response.status >= 400:
                    cause = "http_500" if response.status >= 500 else "refused"
                    raise EngineError(cause, self.name, f"{path}: {response.status} {(await response.text())[:500]}")
                return await _json(response) if parse else None
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise EngineError("unreachable", self.name, f"{path}: {error}") from None
        except TimeoutError:
            raise EngineError("timeout", self.name, f"{path}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError("unreachable", self.name, f"{path}: {type(error).__name__}: {error}") from None
        except ValueError as error:
            raise EngineError("bad_output", self.name, f"{path}: not JSON: {str(error)[:200]}") from None


async def _json(response: aiohttp.ClientResponse) -> Any:
    # flush_cache, pause and abort answer with plain text or nothing
    if response.content_type != "application/json":
        await response.read()
        return None
    return await response.json()


def _object(reply: Any, name: str) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise EngineError("bad_output", name, f"expected a JSON object, got {type(reply).__name__}")
    return reply
