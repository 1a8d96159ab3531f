"""The control routes: abort, pause, weights, state. Bodies and answers as SGLang's; deviations are noted at each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout_server.cpu_engine.access import problem
from rollout_server.cpu_engine.contract import BadRequest
from rollout_server.cpu_engine.engine import Engine, Update
from rollout_server.cpu_engine.generate import Generation, read_json
from rollout_server.cpu_engine.metrics import render
from rollout_server.cpu_engine.scheduler import by_prefix

MODES = ("abort", "retract", "in_place")
UPDATE_KEPT = (
    "load_format",
    "keep_pause",
    "is_async",
    "recapture_cuda_graph",
    "torch_empty_cache",
    "token_step",
    "manifest",
)
"""Fields of an update that SGLang knows and that mean nothing here."""


class Control:
    """Handlers; `info` is what never changes and is shown by /model_info and /server_info."""

    def __init__(self, engine: Engine, generation: Generation, info: dict[str, Any], settings: dict[str, Any]) -> None:
        self._engine, self._generation, self._info, self._settings = engine, generation, info, settings

    def routes(self) -> list[web.RouteDef]:
        both = [
            ("/flush_cache", self.flush_cache),
            ("/health", self.health),
            ("/health_generate", self.health_generate),
        ]
        gets = [
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/model_info", self.model_info),
            ("/get_model_info", self.model_info),
            ("/server_info", self.server_info),
            ("/get_server_info", self.server_info),
            ("/v1/loads", self.loads),
        ]
        posts = [
            ("/abort_request", self.abort_request),
            ("/pause_generation", self.pause_generation),
            ("/continue_generation", self.continue_generation),
            ("/update_weights_from_disk", self.update_weights_from_disk),
            ("/update_weight_version", self.update_weight_version),
            ("/weights_checker", self.weights_checker),
        ]
        return [
            *(web.get(path, handler) for path, handler in gets + both),
            *(web.post(path, handler) for path, handler in posts + both[:1]),
        ]

    async def abort_request(self, http: web.Request) -> web.Response:
        """200 and empty, for unknown rids too. Deviation: requests that arrived during a pause are aborted as well."""
        body = await _object(http)
        rid = _field(body, "rid", str, "")
        if _field(body, "abort_all", bool, False):
            await asyncio.wrap_future(self._engine.abort(lambda _: True))
        elif rid:
            await asyncio.wrap_future(self._engine.abort(by_prefix(rid)))
        return web.Response()

    async def pause_generation(self, http: web.Request) -> web.Response:
        mode = _field(await _object(http), "mode", str, "abort")
        if mode not in MODES:
            raise BadRequest(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        await asyncio.wrap_future(self._engine.pause(mode))
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(self, http: web.Request) -> web.Response:
        await _object(http)
        await asyncio.wrap_future(self._engine.resume())
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def flush_cache(self, http: web.Request) -> web.Response:
        """Deviation: does not wait (`timeout` is ignored)."""
        await asyncio.wrap_future(self._engine.flush_cache())
        return web.Response(text="Cache flushed.\n")

    async def update_weights_from_disk(self, http: web.Request) -> web.Response:
        """Deviation: with in_place and flush_cache=true the 400 comes before any weight changes, not after."""
        body = await _object(http)
        path = _field(body, "model_path", str, "")
        if not path:
            raise BadRequest("model_path is missing")
        for name in body.keys() - {"model_path", "weight_version", "flush_cache", "abort_all_requests", *UPDATE_KEPT}:
            raise BadRequest(f"unknown field {name!r}")
        version = body.get("weight_version")
        update = Update(
            directory=Path(path),
            version=None if version is None else _field(body, "weight_version", str, ""),
            flush_cache=_field(body, "flush_cache", bool, True),
            abort_all=_field(body, "abort_all_requests", bool, False),
        )
        # shielded: a client that goes away must not leave a half-known state; the update is done or refused
        paused = await asyncio.shield(asyncio.wrap_future(self._engine.update(update)))
        return web.json_response(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": paused}
        )

    async def update_weight_version(self, http: web.Request) -> web.Response:
        """SGLang's trap is kept: abort_all_requests is true unless said otherwise."""
        body = await _object(http)
        version = _field(body, "new_version", str, "")
        if not version:
            raise BadRequest("new_version is missing")
        await asyncio.wrap_future(self._engine.relabel(version, _field(body, "abort_all_requests", bool, True)))
        return web.json_response(
            {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        )

    async def weights_checker(self, http: web.Request) -> web.Response:
        """sha256 of each tensor in Hugging Face's layout, so that engines and learner can be compared by it."""
        body = await _object(http)
        if body.get("action") != "checksum":
            raise BadRequest("action must be 'checksum'")
        sums = await asyncio.wrap_future(self._engine.checksums())
        return web.json_response(
            {"success": True, "message": "Success.", "ranks": [{"rank": 0, "checksums": sums}], "checksums": sums}
        )

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._state())

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response({**self._settings, **self._state(), "internal_states": [self._load()]})

    async def loads(self, _: web.Request) -> web.Response:
        load = self._load()
        return web.json_response({"loads": [load], "aggregate": load, **load})

    async def health(self, _: web.Request) -> web.Response:
        """Deviation: answers at once in every state; 503 only when the engine thread is gone."""
        return web.Response(status=200 if self._engine.alive else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """200 when one token was generated. Deviation: 503 at once while paused, not after 20 seconds."""
        well = self._engine.alive and self._engine.paused is None and await self._generation.probe()
        return web.Response(status=200 if well else 503)

    async def ready(self, _: web.Request) -> web.Response:
        if self._engine.paused is not None:
            return problem(503, f"paused ({self._engine.paused})")
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
            "max_total_num_tokens": budget,
            "max_running_requests": s.max_running,
            "token_usage": used / budget,
            "gen_throughput": s.counters.throughput if s.running else 0.0,
            "cache_hit_rate": s.counters.hit_rate,
            "utilization": len(s.running) / s.max_running,
            "num_retracted_reqs": s.counters.retractions,
            "weight_version": s.version,
        }


async def _object(http: web.Request) -> dict[str, Any]:
    """The body as an object; an empty body is an empty object."""
    if not http.can_read_body:
        return {}
    body = await read_json(http)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _field(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise BadRequest(f"{name} must be of type {kind.__name__}, not {type(value).__name__}")
    return value
