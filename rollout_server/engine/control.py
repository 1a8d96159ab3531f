"""Control of one engine that speaks SGLang's HTTP API: health, pauses, weights. Nodes use it; rollouts do not."""

from __future__ import annotations

from typing import Any, Literal

import aiohttp

from protocol.versions import PolicyVersion
from rollout_server.engine.base import EngineError
from rollout_server.engine.http import EngineHttp, json_object


class EngineControl:
    """One engine at `url`. `session` is shared and owned by the caller; `name` goes into errors. Raises EngineError."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, name: str = "") -> None:
        self._http = EngineHttp(session, url, name=name)
        self.name = self._http.name

    async def health(self, *, timeout_s: float) -> None:
        """Raises EngineError unless the engine has just generated a token: a live HTTP port alone proves nothing."""
        await self._http.call(
            "GET", "/health_generate", None, timeout_s=timeout_s, headers=self._http.open_headers, parse=False
        )

    async def version(self) -> PolicyVersion | None:
        """The policy version that the engine says it holds; None for a label that is not ours."""
        info = await self.model_info()
        return PolicyVersion.parse(str(info.get("weight_version", "")))

    async def model_info(self) -> dict[str, Any]:
        """`GET /model_info`: answers at once even while the engine is paused."""
        return json_object(await self._http.control("GET", "/model_info"), self.name)

    async def server_info(self) -> dict[str, Any]:
        """`GET /server_info`: how it was started. SGLang's scheduler answers it, so it may hang with that one."""
        return json_object(await self._http.control("GET", "/server_info"), self.name)

    async def tokenize(self, text: str) -> list[int] | None:
        """`POST /tokenize`: ids of `text` without special tokens; None where the answer holds none."""
        body = {"model": "default", "prompt": text, "add_special_tokens": False}
        reply = json_object(await self._http.control("POST", "/tokenize", body), self.name)
        return reply.get("tokens")

    async def scheduler_figures(self, *, timeout_s: float) -> Any:
        """What `GET /v1/loads` says of each scheduler, as it is: it differs as soon as one of them has done a step.

        The HTTP side answers at once, from what its scheduler wrote last.
        """
        return json_object(await self._http.control("GET", "/v1/loads", None, timeout_s), self.name).get("loads")

    async def loads(self) -> dict[str, float]:
        """`GET /v1/loads`, summed over data-parallel ranks.

        running, waiting, tokens_per_s, token_usage, max_running, max_tokens (of the KV cache), and retractions since
        the start, 0 where the engine does not say.
        """
        reply = json_object(await self._http.control("GET", "/v1/loads"), self.name)
        ranks = reply.get("loads") or [reply]
        names = {
            "running": "num_running_reqs",
            "waiting": "num_waiting_reqs",
            "tokens_per_s": "gen_throughput",
            "token_usage": "token_usage",
            "max_running": "max_running_requests",
            "max_tokens": "max_total_num_tokens",
            "retractions": "num_retracted_reqs",
        }
        try:
            out = {ours: float(sum(rank.get(theirs) or 0 for rank in ranks)) for ours, theirs in names.items()}
        except (TypeError, AttributeError) as error:
            raise EngineError("bad_output", self.name, f"/v1/loads: {error}") from None
        return out | {"token_usage": out["token_usage"] / len(ranks)}

    async def pause(self, mode: Literal["retract", "in_place", "abort"]) -> None:
        """Hold every request: `retract` requeues them, so that no key or value of the old version survives."""
        await self._http.control("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """`POST /continue_generation`: requests that were held, or came meanwhile, go on."""
        await self._http.control("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Forget every cached prefix."""
        await self._http.control("POST", "/flush_cache")

    async def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort the request `rid`, or all of them; the engine answers the same for ids it does not know."""
        await self._http.control("POST", "/abort_request", {"rid": rid, "abort_all": everything})

    async def update_weights_from_disk(self, path: str, *, label: str, flush: bool, timeout_s: float) -> None:
        """Load the directory `path` and call it `label`. Raises EngineError; the weights may then be half changed."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush, "abort_all_requests": False}
        reply = json_object(await self._http.control("POST", "/update_weights_from_disk", body, timeout_s), self.name)
        if reply.get("success") is not True:
            raise EngineError("refused", self.name, str(reply.get("message", "update failed"))[:500])
