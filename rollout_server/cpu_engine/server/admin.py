"""Control routes: abort, pause, state. Bodies and answers are SGLang's; each handler documents its deviations."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from protocol.messages import MetricsSnapshot
from protocol.runtime.metrics import SECONDS, MetricsPage, Table, counter, gauge, histogram
from rollout_server.cpu_engine.scheduler.engine import MEMORY, Engine
from rollout_server.cpu_engine.scheduler.scheduler import by_prefix
from rollout_server.cpu_engine.server.auth import problem
from rollout_server.cpu_engine.server.generate import Generation
from rollout_server.cpu_engine.server.validation import BadRequest, optional, read_object

PREFIX = "sglang:"
"""Metrics of the engine, with SGLang's names."""
ENGINE: Table = {
    "num_running_reqs": gauge("Running requests, which are decoded now."),
    "num_queue_reqs": gauge("Requests in the queue."),
    "num_paused_reqs": gauge("Requests held by a pause."),
    "num_used_tokens": gauge("Tokens of running requests in the KV cache."),
    "kv_used_tokens": gauge("Space taken in the KV cache, in tokens: padded running requests, and prefixes."),
    "kv_available_tokens": gauge("Free space in the KV cache, in tokens."),
    "max_total_num_tokens": gauge("Size of the KV cache in tokens."),
    "token_usage": gauge("Share of the KV cache used by running requests."),
    "cache_hit_rate": gauge("Share of prompt tokens found in the prefix cache since the start."),
    "gen_throughput": gauge("Generated tokens per second, over about the last second."),
    "prompt_tokens_total": counter("Prompt tokens of all requests."),
    "cached_tokens_total": counter("Prompt tokens found in the prefix cache."),
    "generation_tokens_total": counter("Tokens that were generated."),
    "num_requests_total": counter("Requests that ended."),
    "num_aborted_requests_total": counter("Requests ended by an abort or an error."),
    "num_retracted_reqs": gauge("Retractions of running requests since the start."),
    "weight_updates_total": counter("Completed updates of the weights."),
    "step_errors_total": counter("Decoding steps that failed."),
    "time_to_first_token_seconds": histogram("Seconds from a request's arrival to its first token.", SECONDS),
    "e2e_request_latency_seconds": histogram("Seconds from a request's arrival to its end.", SECONDS),
}

MODES = ("abort", "retract", "in_place")
HEALTH = ("/health", "/health_generate")
_PICKLED = (
    "its tensors are pickled, and this engine never unpickles data from clients: "
    "use /update_weights_from_distributed or /update_weights_from_disk"
)
_PROFILE = "this engine has no profiler; attach one to its process"
ABSENT = {
    "/update_weights_from_tensor": _PICKLED,
    "/update_weights_from_ipc": "it passes handles of GPU memory; use /update_weights_from_distributed",
    "/load_lora_adapter_from_tensors": "its tensors are pickled; use /load_lora_adapter",
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
}
"""Routes of SGLang that are rejected with a reason (400). Other unsupported routes are 404."""


async def refuse(http: web.Request) -> web.Response:
    """Raise BadRequest with the reason in ABSENT."""
    raise BadRequest(f"{http.path} is not supported: {ABSENT[http.path]}")


def render(engine: Engine, model_name: str) -> str:
    """Return the body of GET /metrics. Every sample has the label model_name."""
    counters = engine.scheduler.counters
    drawn = {"time_to_first_token_seconds": counters.first_token, "e2e_request_latency_seconds": counters.latency}
    now = MetricsSnapshot(process="engine", id="", values=_values(engine))
    return MetricsPage(PREFIX, ENGINE, lambda: now, lambda: drawn, {"model_name": model_name}).text().decode()


def _values(engine: Engine) -> dict[str, float]:
    s = engine.scheduler
    c, budget = s.counters, s.runner.kv.budget
    used, held = s.used_tokens, s.row_tokens + s.cache.tokens
    return {
        "num_running_reqs": len(s.running),
        "num_queue_reqs": engine.waiting,
        "num_paused_reqs": (len(s.running) + engine.waiting) if engine.paused else 0,
        "num_used_tokens": used,
        "kv_used_tokens": held,
        "kv_available_tokens": max(budget - held, 0),
        "max_total_num_tokens": budget,
        "token_usage": used / budget,
        "cache_hit_rate": c.hit_rate,
        "gen_throughput": c.throughput if s.running else 0.0,
        "prompt_tokens_total": c.prompt_tokens,
        "cached_tokens_total": c.cached_tokens,
        "generation_tokens_total": c.generated_tokens,
        "num_requests_total": c.requests,
        "num_aborted_requests_total": c.aborted,
        "num_retracted_reqs": c.retractions,
        "weight_updates_total": c.weight_updates,
        "step_errors_total": c.step_errors,
    }


class AdminRoutes:
    """Handlers. `info` holds the constant fields of /model_info and /server_info."""

    def __init__(self, engine: Engine, generation: Generation, info: dict[str, Any], settings: dict[str, Any]) -> None:
        self._engine, self._generation, self._info, self._settings = engine, generation, info, settings

    def routes(self) -> list[web.RouteDef]:
        both = [
            ("/flush_cache", self.flush_cache),
            ("/health", self.health),
            ("/health_generate", self.health_generate),
            ("/release_memory_occupation", self.release_memory),
            ("/resume_memory_occupation", self.resume_memory),
        ]
        gets = [
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/model_info", self.model_info),
            ("/get_model_info", self.model_info),
            ("/server_info", self.server_info),
            ("/get_server_info", self.server_info),
            ("/get_weight_version", self.weight_version),
            ("/weight_version", self.weight_version),
            ("/v1/loads", self.loads),
        ]
        posts = [
            ("/abort_request", self.abort_request),
            ("/pause_generation", self.pause_generation),
            ("/continue_generation", self.continue_generation),
        ]
        return [
            *(web.get(path, handler) for path, handler in gets + both),
            *(web.post(path, handler) for path, handler in posts + both if path not in HEALTH),
            *(web.post(path, refuse) for path in ABSENT),
        ]

    async def abort_request(self, http: web.Request) -> web.Response:
        """Return 200, also for unknown rids. Deviation: requests that arrived in a pause are aborted too."""
        body = await read_object(http)
        rid = optional(body, "rid", str, "")
        if optional(body, "abort_all", bool, False):
            await asyncio.wrap_future(self._engine.abort(lambda _: True))
        elif rid:
            await asyncio.wrap_future(self._engine.abort(by_prefix(rid)))
        return web.Response()

    async def pause_generation(self, http: web.Request) -> web.Response:
        mode = optional(await read_object(http), "mode", str, "abort")
        if mode not in MODES:
            raise BadRequest(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        await asyncio.wrap_future(self._engine.pause(mode))
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(self, http: web.Request) -> web.Response:
        await read_object(http)
        await asyncio.wrap_future(self._engine.resume())
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def release_memory(self, http: web.Request) -> web.Response:
        """Free the KV cache; requests get 503 until all memory is resumed.

        Deviation: 400 while requests run (SGLang exits), and the weights stay.
        """
        await asyncio.wrap_future(self._engine.release(await _tags(http)))
        return web.json_response(None)

    async def resume_memory(self, http: web.Request) -> web.Response:
        await asyncio.wrap_future(self._engine.reoccupy(await _tags(http)))
        return web.json_response(None)

    async def flush_cache(self, http: web.Request) -> web.Response:
        """Clear the prefix cache. Deviation: does not wait (`timeout` is ignored)."""
        await asyncio.wrap_future(self._engine.flush_cache())
        return web.Response(text="Cache flushed.\n")

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._state())

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response({**self._settings, **self._state(), "internal_states": [self._load()]})

    async def weight_version(self, _: web.Request) -> web.Response:
        """Return the weight version. In SGLang up to 0.5.20; used by slime's client."""
        return web.json_response({"weight_version": self._engine.scheduler.version})

    async def loads(self, _: web.Request) -> web.Response:
        load = self._load()
        return web.json_response({"loads": [load], "aggregate": load, **load})

    async def health(self, _: web.Request) -> web.Response:
        """Return 200. Deviation: at once in every state; 503 only when the engine thread has ended."""
        return web.Response(status=200 if self._engine.alive else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """Return 200 when one token was generated. Deviation: 503 at once while paused, not after 20 seconds."""
        well = self._engine.alive and not self._engine.stopped and await self._generation.probe()
        return web.Response(status=200 if well else 503)

    async def ready(self, _: web.Request) -> web.Response:
        if self._engine.paused is not None:
            return problem(503, f"paused ({self._engine.paused})")
        if self._engine.released:
            return problem(503, f"memory released ({', '.join(sorted(self._engine.released))})")
        return web.Response(status=200 if self._engine.alive else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=render(self._engine, self._info["served_model_name"]), content_type="text/plain")

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        return {
            **self._info,
            "model_path": str(engine.model_path),
            "weight_version": engine.scheduler.version,
            "paused": engine.paused,
        }

    def _load(self) -> dict[str, Any]:
        s = self._engine.scheduler
        used, budget = s.used_tokens, s.runner.kv.budget
        return {
            "dp_rank": 0,
            "num_running_reqs": len(s.running),
            "num_waiting_reqs": self._engine.waiting,
            "num_total_reqs": len(s.running) + self._engine.waiting,
            "num_used_tokens": used,
            "num_kept_tokens": s.cache.tokens,
            "num_computed_tokens": s.counters.computed_tokens,
            "num_computed_layers": s.runner.model.layers_done,
            "slowest_step_s": s.counters.pace_s,
            "max_total_num_tokens": budget,
            "max_running_requests": s.max_running,
            "token_usage": used / budget,
            "gen_throughput": s.counters.throughput if s.running else 0.0,
            "cache_hit_rate": s.counters.hit_rate,
            "utilization": len(s.running) / s.max_running,
            "num_retracted_reqs": s.counters.retractions,
            "weight_version": s.version,
        }


async def _tags(http: web.Request) -> frozenset[str]:
    """Return the requested memory tags; default all."""
    tags = optional(await read_object(http), "tags", list, None) or list(MEMORY)
    if unknown := [tag for tag in tags if tag not in MEMORY]:
        raise BadRequest(f"tags must be some of {', '.join(MEMORY)}, not {unknown[0]!r:.40}")
    return frozenset(tags)
