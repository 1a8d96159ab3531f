"""Routes that change weights and their label, as in SGLang; each handler documents its deviations.

A client that disconnects never interrupts a change: it is completed or rejected before the next call is handled.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import torch
from aiohttp import web

from protocol.weights import refusal
from rollout_server.cpu_engine.scheduler.engine import Engine, Update
from rollout_server.cpu_engine.server.validation import BadRequest, optional, read_object, required
from rollout_server.cpu_engine.weight_sync.group import Bucket, RendezvousSpec, TensorSpec
from rollout_server.cpu_engine.weight_sync.session import UpdateSessions

T = TypeVar("T")
GROUP = "weight_update_group"
DISK_FIELDS = frozenset(
    {
        *("model_path", "weight_version", "flush_cache", "abort_all_requests"),
        # fields of SGLang without effect here
        *("load_format", "keep_pause", "is_async", "recapture_cuda_graph", "torch_empty_cache", "token_step"),
        "manifest",
    }
)


class WeightRoutes:
    """Handlers."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine, self._sessions = engine, UpdateSessions(engine, timeout_s)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/update_weights_from_disk", self.from_disk),
            web.post("/update_weight_version", self.version),
            web.post("/weights_checker", self.checker),
            web.post("/post_process_weights", self.post_process),
            web.post("/init_weights_update_group", self.init_group),
            web.post("/destroy_weights_update_group", self.destroy_group),
            web.post("/begin_weight_update", self.begin),
            web.post("/update_weights_from_distributed", self.from_distributed),
            web.post("/end_weight_update", self.end),
        ]

    async def close(self) -> bool:
        """Leave all groups. Return False if a thread still waits for a trainer and would delay the exit."""
        return await self._sessions.close()

    async def from_disk(self, http: web.Request) -> web.Response:
        """Load a directory. Deviation: in_place with flush_cache=true is rejected before any weight changes."""
        body = await read_object(http)
        path = required(body, "model_path", str)
        for name in body.keys() - DISK_FIELDS:
            raise BadRequest(f"unknown field {name!r}")
        update = Update(
            source=Path(path),
            version=optional(body, "weight_version", str, None),
            flush_cache=optional(body, "flush_cache", bool, True),
            abort_all=optional(body, "abort_all_requests", bool, False),
        )
        paused = await _to_the_end(asyncio.wrap_future(self._engine.update(update)))
        return _done("Succeeded to update model weights.", num_paused_requests=paused)

    async def version(self, http: web.Request) -> web.Response:
        """Set the label. Warning: as in SGLang, abort_all_requests is true by default."""
        body = await read_object(http)
        version = required(body, "new_version", str)
        await asyncio.wrap_future(self._engine.relabel(version, optional(body, "abort_all_requests", bool, True)))
        return _done(f"Weight version updated to {version}", new_version=version)

    async def checker(self, http: web.Request) -> web.Response:
        """Check weights. SGLang's other fields (quantised weights, names to skip) are ignored.

        `checksum` returns that of each tensor in Hugging Face's layout, for comparison with the learner: the sha256, or
        by the `algorithm` in the body.
        `snapshot`, `reset_tensors` and `compare` test whether an update restores the weights.
        """
        body = await read_object(http)
        action = optional(body, "action", str, "checksum")
        actions = {
            "snapshot": self._engine.snapshot,
            "reset_tensors": self._engine.reset_tensors,
            "compare": self._engine.compare,
        }
        if action in actions:
            await asyncio.wrap_future(actions[action]())
            return _done("Success.")
        if action != "checksum":
            raise BadRequest(f"action must be one of checksum, {', '.join(actions)}, not {action!r:.40}")
        sums = await asyncio.wrap_future(self._engine.checksums(_algorithm(body)))
        return _done("Success.", ranks=[{"rank": 0, "checksums": sums}], checksums=sums)

    async def post_process(self, http: web.Request) -> web.Response:
        """Do nothing: SGLang before 0.5.21 processes quantised weights here, and this engine has none."""
        await read_object(http)
        return _done("Success.")

    async def init_group(self, http: web.Request) -> web.Response:
        """Join a group; returns when the trainer has joined. Deviation: 400 after --update-timeout-s; gloo only."""
        body = await read_object(http)
        rendezvous = RendezvousSpec(
            name=required({"group_name": GROUP} | body, "group_name", str),
            address=required(body, "master_address", str),
            port=required(body, "master_port", int),
            rank=required(body, "rank_offset", int),
            world_size=required(body, "world_size", int),
        )
        if not 0 < rendezvous.port < 1 << 16 or not 0 < rendezvous.rank < rendezvous.world_size:
            raise BadRequest("master_port must be a port, and rank_offset must be between 1 and world_size - 1")
        if (backend := optional(body, "backend", str, "nccl")) != "gloo":
            raise BadRequest(
                f"Failed to initialize custom process group: {backend} needs GPUs; this engine supports only gloo."
            )
        await _to_the_end(asyncio.create_task(self._sessions.join(rendezvous)))
        return _done("Succeeded to initialize custom process group.")

    async def destroy_group(self, http: web.Request) -> web.Response:
        """Destroy a group. Deviation: also possible in the middle of a bucket, which then fails with 400."""
        name = optional(await read_object(http), "group_name", str, GROUP)
        await _to_the_end(asyncio.create_task(self._sessions.leave(name)))
        return _done("Succeeded to destroy custom process group.")

    async def begin(self, http: web.Request) -> web.Response:
        """Open a session. `selector` is ignored: there is no draft model. `algorithm`: of the checksums to come."""
        self._sessions.begin(_algorithm(await read_object(http)))
        return _done("Success")

    async def from_distributed(self, http: web.Request) -> web.Response:
        """Receive a bucket. Deviation: generation continues, and nothing changes before end_weight_update."""
        body = await read_object(http)
        version = optional(body, "weight_version", str, None)
        arrival = self._sessions.receive(
            optional(body, "group_name", str, GROUP),
            _bucket(body),
            version=version,
            flush_cache=optional(body, "flush_cache", bool, True),
            abort_all=optional(body, "abort_all_requests", bool, False),
        )
        await _to_the_end(arrival)
        more = "" if version is None else f" Weight version will be {version} at end_weight_update()."
        return _done("Succeeded to update parameter online." + more)

    async def end(self, http: web.Request) -> web.Response:
        """Close the session and switch to the new weights.

        Deviation: 400 and the old weights if a tensor is missing or a bucket failed (SGLang: partly loaded).
        Without a pause it waits for the running requests, like an update from disk. Always closes the session.
        """
        await read_object(http)
        await _to_the_end(asyncio.create_task(self._sessions.end()))
        return _done("Success")


async def _to_the_end(work: asyncio.Future[T]) -> T:
    """Return the result of `work`. If the client disconnects, `work` continues, and its failure is not reported."""
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(work)


def _done(message: str, **more: Any) -> web.Response:
    return web.json_response({"success": True, "message": message, **more})


def _algorithm(body: dict[str, Any]) -> str:
    algorithm: str = optional(body, "algorithm", str, "sha256")
    if why := refusal(algorithm):
        raise BadRequest(why)
    return algorithm


def _bucket(body: dict[str, Any]) -> Bucket:
    names, dtypes, shapes = (required(body, name, list) for name in ("names", "dtypes", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest("names, dtypes and shapes must have the same length")
    load_format = optional(body, "load_format", str, None)
    if load_format not in (None, "flattened_bucket"):
        raise BadRequest(f"load_format must be null or 'flattened_bucket', not {load_format!r}")
    parts = [_part(*three) for three in zip(names, dtypes, shapes, strict=True)]
    return Bucket(parts, flattened=load_format is not None)


def _part(name: Any, dtype: Any, shape: Any) -> TensorSpec:
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(name, str) or not isinstance(kind, torch.dtype):
        raise BadRequest(f"tensor {name!r:.80} has the unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise BadRequest(f"the shape of {name!r:.80} must be a list of numbers, not {shape!r:.80}")
    return TensorSpec(name, kind, tuple(shape))
