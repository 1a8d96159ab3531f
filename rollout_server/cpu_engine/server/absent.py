"""Routes of SGLang that this engine does not support, each with the reason."""

from __future__ import annotations

from aiohttp import web

from rollout_server.cpu_engine.server.validation import BadRequest

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
