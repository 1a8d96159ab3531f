"""Control of one engine that has SGLang's HTTP API: health, pauses, weights. Nodes use it; rollouts do not."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from protocol.messages import WeightView
from protocol.versions import PolicyVersion
from protocol.weights import WeightBucket
from rollout_server.engine.base import EngineError
from rollout_server.engine.client import CONTROL_TIMEOUT_S, EngineHttp, json_object

LAYERS = "num_computed_layers"
"""Figure of the CPU engine in /v1/loads: layers computed since its start."""
NO_PROGRESS = frozenset({"num_waiting_reqs", "num_total_reqs", "num_waiting_uncached_tokens", "queues", "timestamp"})
"""Figures in /v1/loads that change without a step."""


@dataclass(frozen=True)
class WeightChecksums:
    """Checksums of an engine's weights.

    whole    over all tensors, comparable between engines of one kind and layout
    tensors  in hex by Hugging Face name, in the engine's dtype; empty where it has another layout (SGLang)
    """

    whole: str
    tensors: Mapping[str, str] = field(default_factory=dict)


class EngineAdmin:
    """One engine at `url`. The caller owns `session`; `name` appears in errors. Methods raise EngineError."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, name: str = "", key: str = "") -> None:
        self._http = EngineHttp(session, url, name=name, key=key)
        self.name = self._http.name

    def use_keys(self, api_key: str, admin_key: str) -> None:
        """Set the keys of the engine: every incarnation has different ones."""
        self._http.use_keys(api_key, admin_key)

    def set_control_limit(self, seconds: float) -> None:
        """Set the timeout of calls that are answered between two steps."""
        self._http.control_s = seconds

    async def health(self, *, timeout_s: float) -> None:
        """Raise EngineError unless the engine can generate a token: an open HTTP port alone proves nothing."""
        await self._http.call(
            "GET", "/health_generate", None, timeout_s=timeout_s, headers=self._http.open_headers, parse=False
        )

    async def warm_up(self, sampling: Mapping[str, float], *, timeout_s: float) -> None:
        """Generate with the parameters of the run's requests: SGLang compiles the kernels for them at first use."""
        params = {"max_new_tokens": 2, "ignore_eos": True, **sampling}
        body = {"input_ids": [0, 1, 2], "sampling_params": params, "return_logprob": True}
        await self._ask("POST", "/generate", body, timeout_s)

    async def paused(self) -> bool:
        """Return whether the engine answers but does not generate (`GET /ready`): it is paused or still starting."""
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
        """Call a read-only route: SGLang accepts the API key for it, and not the admin key."""
        headers = self._http.open_headers
        reply = await self._http.call(method, path, body, timeout_s=timeout_s, headers=headers)
        return json_object(reply, self.name)

    async def version(self) -> PolicyVersion | None:
        """Return the policy version that the engine reports; None for a label in another format."""
        info = await self.model_info()
        return PolicyVersion.parse(str(info.get("weight_version", "")))

    async def model_info(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Return `GET /model_info`. Answers at once, even while the engine is paused."""
        return await self._ask("GET", "/model_info", timeout_s=timeout_s)

    async def server_info(self) -> dict[str, Any]:
        """Return `GET /server_info`: its start arguments. Hangs if SGLang's scheduler hangs."""
        return await self._ask("GET", "/server_info")

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the ids of `text` without special tokens (`POST /tokenize`); None if the answer has none."""
        body = {"model": "default", "prompt": text, "add_special_tokens": False}
        return (await self._ask("POST", "/tokenize", body)).get("tokens")

    async def scheduler_figures(self, *, timeout_s: float) -> Any:
        """Return what changes in `GET /v1/loads` only when a scheduler computes, for each scheduler.

        The CPU engine counts the layers within a step. Other figures change at the end of a step; the length of
        the queue is left out, because a scheduler that only receives requests changes it too. The HTTP process answers
        at once, with the last values of its schedulers.
        """
        loads = (await self._ask("GET", "/v1/loads", None, timeout_s)).get("loads")
        if not isinstance(loads, list) or not all(isinstance(rank, dict) for rank in loads):
            return loads
        return [rank.get(LAYERS, {k: v for k, v in rank.items() if k not in NO_PROGRESS}) for rank in loads]

    async def loads(self) -> dict[str, float]:
        """Return `GET /v1/loads`, summed over data-parallel ranks.

        Keys: running, waiting, tokens_per_s, token_usage, max_running, max_tokens (of the KV cache), retractions
        since the start, and pace_s (the slowest recent step). 0 for a value that the engine does not report.
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
            "pace_s": "slowest_step_s",
        }
        try:
            out = {ours: float(sum(rank.get(theirs) or 0 for rank in ranks)) for ours, theirs in names.items()}
        except (TypeError, AttributeError, OverflowError) as error:
            raise EngineError("bad_output", self.name, f"/v1/loads: {error}") from None
        return out | {"token_usage": out["token_usage"] / len(ranks)}

    async def counter(self, name: str) -> float:
        """Return a counter in `GET /metrics`, summed over its labels; 0.0 if the engine does not have it."""
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
        """Pause generation. `retract` requeues the running requests, so that no KV entry of the old version remains."""
        await self._http.control("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Resume generation (`POST /continue_generation`), for paused requests and those that arrived meanwhile."""
        await self._http.control("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Clear the prefix cache."""
        await self._http.control("POST", "/flush_cache")

    async def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort the request `rid`, or all. The engine gives the same answer for unknown ids."""
        await self._http.control("POST", "/abort_request", {"rid": rid, "abort_all": everything})

    async def update_weights_from_disk(self, path: str, *, label: str, flush: bool, timeout_s: float) -> None:
        """Load weights from the directory `path` as version `label`. After EngineError, the weights may be mixed."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush, "abort_all_requests": False}
        reply = json_object(await self._http.control("POST", "/update_weights_from_disk", body, timeout_s), self.name)
        if reply.get("success") is not True:
            raise EngineError("refused", self.name, str(reply.get("message", "update failed"))[:500])

    # --- weights through a process group in which the learner is rank 0 ---

    async def join_group(self, view: WeightView, rank_offset: int, *, timeout_s: float) -> None:
        """`POST /init_weights_update_group`: returns when every rank has joined.

        Raises EngineError. An engine whose peers never join may hang longer than the timeout: it must be restarted.
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
        """`POST /destroy_weights_update_group`. Raises EngineError if there is no group of that name."""
        await self._weights("/destroy_weights_update_group", {"group_name": group}, timeout_s)

    async def begin_update(self, *, timeout_s: float, algorithm: str = "") -> None:
        """`POST /begin_weight_update`: SGLang accepts buckets only inside such a session, and only one session.

        algorithm  of the checksums that a CPU engine computes while it receives; "": its default
        """
        await self._weights("/begin_weight_update", {"algorithm": algorithm} if algorithm else {}, timeout_s)

    async def receive_bucket(self, bucket: WeightBucket, group: str, *, flattened: bool, timeout_s: float) -> None:
        """`POST /update_weights_from_distributed`: join one broadcast (one per tensor unless `flattened`).

        Sends no label: SGLang would apply it after the first of many buckets. After EngineError, the weights may be
        mixed.
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
        """Set the version label of the weights. Requests in flight continue (by default SGLang would abort them)."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._weights("/update_weight_version", body, 0.0)

    async def checksums(self, *, timeout_s: float, algorithm: str = "") -> WeightChecksums:
        """Return the checksums of the engine's weights; `algorithm`: as for `begin_update`."""
        body = {"action": "checksum"} | ({"algorithm": algorithm} if algorithm else {})
        reply = json_object(await self._http.control("POST", "/weights_checker", body, timeout_s), self.name)
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
        """`POST /load_lora_adapter`, in place of an adapter of that name, which may be another run's."""
        body = {"lora_name": name, "lora_path": path}
        try:
            await self._weights("/load_lora_adapter", body, timeout_s)
        except EngineError as error:
            if "already loaded" not in error.detail:
                raise
            await self.unload_adapter(name, timeout_s=timeout_s)
            await self._weights("/load_lora_adapter", body, timeout_s)

    async def adapter_versions(self) -> list[str]:
        """Return the names of loaded adapters that are policy versions (`GET /v1/models`)."""
        cards = (await self._ask("GET", "/v1/models")).get("data") or []
        names = [str(card.get("id")) for card in cards if isinstance(card, dict)]
        return [name for name in names if PolicyVersion.parse(name)]

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """`POST /unload_lora_adapter`: SGLang answers when no request uses the adapter any more."""
        await self._weights("/unload_lora_adapter", {"lora_name": name}, timeout_s)

    async def _weights(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        reply = json_object(await self._http.control("POST", path, body, timeout_s), self.name)
        if reply.get("success") is False:
            why = reply.get("message") or reply.get("error_message") or "refused"
            raise EngineError("refused", self.name, f"{path}: {str(why)[:500]}")
