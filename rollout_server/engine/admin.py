"""Control of one engine that speaks SGLang's HTTP API: health, pauses, weights. Nodes use it; rollouts do not."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from protocol.messages import WeightBucket, WeightView
from protocol.versions import PolicyVersion
from rollout_server.engine.base import EngineError
from rollout_server.engine.client import CONTROL_TIMEOUT_S, EngineHttp, json_object


@dataclass(frozen=True)
class WeightChecksums:
    """Of an engine's weights.

    whole    of all of them, comparable between engines of one kind and layout
    tensors  sha256 hex by Hugging Face name, in the engine's dtype; empty where it has another layout (SGLang)
    """

    whole: str
    tensors: Mapping[str, str] = field(default_factory=dict)


class EngineAdmin:
    """One engine at `url`. `session` is shared and owned by the caller; `name` goes into errors. Raises EngineError."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, name: str = "") -> None:
        self._http = EngineHttp(session, url, name=name)
        self.name = self._http.name

    def use_keys(self, api_key: str, admin_key: str) -> None:
        """The keys of the engine that is there from now on: every incarnation has its own."""
        self._http.use_keys(api_key, admin_key)

    async def health(self, *, timeout_s: float) -> None:
        """Raises EngineError unless the engine has just generated a token: a live HTTP port alone proves nothing."""
        await self._http.call(
            "GET", "/health_generate", None, timeout_s=timeout_s, headers=self._http.open_headers, parse=False
        )

    async def paused(self) -> bool:
        """Whether it answers and generates nothing because it was paused (or is still starting): `GET /ready`."""
        try:
            await self._http.call(
                "GET", "/ready", None, timeout_s=CONTROL_TIMEOUT_S, headers=self._http.open_headers, parse=False
            )
        except EngineError as error:
            return error.cause == "http_500" and " 503 " in error.detail
        return False

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """A route that changes nothing: SGLang opens it with the API key, and not with the admin key."""
        headers = self._http.open_headers
        reply = await self._http.call(method, path, body, timeout_s=timeout_s, headers=headers)
        return json_object(reply, self.name)

    async def version(self) -> PolicyVersion | None:
        """The policy version that the engine says it holds; None for a label that is not ours."""
        info = await self.model_info()
        return PolicyVersion.parse(str(info.get("weight_version", "")))

    async def model_info(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """`GET /model_info`: answers at once even while the engine is paused."""
        return await self._ask("GET", "/model_info", timeout_s=timeout_s)

    async def server_info(self) -> dict[str, Any]:
        """`GET /server_info`: how it was started. SGLang's scheduler answers it, so it may hang with that one."""
        return await self._ask("GET", "/server_info")

    async def tokenize(self, text: str) -> list[int] | None:
        """`POST /tokenize`: ids of `text` without special tokens; None where the answer holds none."""
        body = {"model": "default", "prompt": text, "add_special_tokens": False}
        return (await self._ask("POST", "/tokenize", body)).get("tokens")

    async def scheduler_figures(self, *, timeout_s: float) -> Any:
        """What `GET /v1/loads` says of each scheduler, as it is: it differs as soon as one of them has done a step.

        The HTTP side answers at once, from what its scheduler wrote last.
        """
        return (await self._ask("GET", "/v1/loads", None, timeout_s)).get("loads")

    async def loads(self) -> dict[str, float]:
        """`GET /v1/loads`, summed over data-parallel ranks.

        running, waiting, tokens_per_s, token_usage, max_running, max_tokens (of the KV cache), and retractions since
        the start, 0 where the engine does not say.
        """
        reply = await self._ask("GET", "/v1/loads")
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
        except (TypeError, AttributeError, OverflowError) as error:
            raise EngineError("bad_output", self.name, f"/v1/loads: {error}") from None
        return out | {"token_usage": out["token_usage"] / len(ranks)}

    async def counter(self, name: str) -> float:
        """A counter in `GET /metrics`, summed over its labels; 0.0 where the engine does not count that."""
        text = await self._http.call(
            "GET", "/metrics", None, timeout_s=CONTROL_TIMEOUT_S, headers=self._http.open_headers
        )
        values = [
            line.rpartition(" ")[2] for line in str(text).splitlines() if re.match(re.escape(name) + r"[{ ]", line)
        ]
        try:
            return sum(float(value) for value in values)
        except ValueError as error:
            raise EngineError("bad_output", self.name, f"/metrics: {error}") from None

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

    # --- weights over a group of which the learner is rank 0 ---

    async def join_group(self, view: WeightView, rank_offset: int, *, timeout_s: float) -> None:
        """`POST /init_weights_update_group`: answers when every rank has joined.

        Raises EngineError. An engine whose peers never come may be stuck beyond the timeout: only its end helps then.
        """
        body = {
            "master_address": view.address,
            "master_port": view.port,
            "rank_offset": rank_offset,
            "world_size": view.world_size,
            "group_name": view.group,
            "backend": view.backend,
        }
        await self._weights("/init_weights_update_group", body, timeout_s)

    async def leave_group(self, group: str, *, timeout_s: float) -> None:
        """`POST /destroy_weights_update_group`; refused when there is none of that name."""
        await self._weights("/destroy_weights_update_group", {"group_name": group}, timeout_s)

    async def begin_update(self, *, timeout_s: float) -> None:
        """`POST /begin_weight_update`: SGLang refuses buckets outside of such a session, and a second one."""
        await self._weights("/begin_weight_update", {}, timeout_s)

    async def receive_bucket(self, bucket: WeightBucket, group: str, *, flattened: bool, timeout_s: float) -> None:
        """`POST /update_weights_from_distributed`: joins one broadcast (each tensor's own unless `flattened`).

        No label goes along: SGLang would call a model so that has received one bucket of many. Raises EngineError;
        the weights may then be half changed.
        """
        body = {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group,
            "flush_cache": False,
            "abort_all_requests": False,
            "load_format": "flattened_bucket" if flattened else None,
        }
        await self._weights("/update_weights_from_distributed", body, timeout_s)

    async def end_update(self, *, timeout_s: float) -> None:
        """`POST /end_weight_update`."""
        await self._weights("/end_weight_update", {}, timeout_s)

    async def label(self, label: str) -> None:
        """Call the weights `label`; requests in flight stay (by default SGLang would end them)."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._weights("/update_weight_version", body, CONTROL_TIMEOUT_S)

    async def checksums(self, *, timeout_s: float) -> WeightChecksums:
        """What the engine holds."""
        reply = json_object(
            await self._http.control("POST", "/weights_checker", {"action": "checksum"}, timeout_s), self.name
        )
        whole = reply.get("per_engine_checksum")
        if isinstance(whole, str) and whole:
            return WeightChecksums(whole)
        if reply.get("success") is not True or not reply.get("ranks"):
            raise EngineError("bad_output", self.name, f"/weights_checker: {str(reply.get('message', reply))[:300]}")
        ranks = hashlib.sha256(json.dumps(reply["ranks"], sort_keys=True).encode()).hexdigest()
        tensors = reply.get("checksums")
        return WeightChecksums(ranks, tensors if isinstance(tensors, dict) else {})

    # --- adapters ---

    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> None:
        """`POST /load_lora_adapter`; one of that name that is there already counts as loaded. Raises EngineError."""
        body = {"lora_name": name, "lora_path": path}
        try:
            await self._weights("/load_lora_adapter", body, timeout_s)
        except EngineError as error:
            if "already loaded" not in error.detail:
                raise

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """`POST /unload_lora_adapter`: SGLang answers when no request uses it any more."""
        await self._weights("/unload_lora_adapter", {"lora_name": name}, timeout_s)

    async def _weights(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        reply = json_object(await self._http.control("POST", path, body, timeout_s), self.name)
        if reply.get("success") is False:
            why = reply.get("message") or reply.get("error_message") or "refused"
            raise EngineError("refused", self.name, f"{path}: {str(why)[:500]}")
