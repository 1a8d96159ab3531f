"""Routes that SGLang's clients know and this engine cannot have, each with its reason."""

from __future__ import annotations

from aiohttp import web

from rollout_server.cpu_engine.server.validation import BadRequest

_PICKLED = (
    "its tensors are pickled, and this engine unpickles nothing that it is sent: "
    "use /update_weights_from_distributed or /update_weights_from_disk"
)
_PROFILE = "this engine has no profiler: attach one to its process"
ABSENT = {
    "/update_weights_from_tensor": _PICKLED,
    "/update_weights_from_ipc": "it passes handles of GPU memory: use /update_weights_from_distributed",
    "/load_lora_adapter_from_tensors": "its tensors are pickled: use /load_lora_adapter",
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
}
"""Routes that SGLang's clients know and this engine refuses with a reason (400); the rest of SGLang's are 404."""


async def refuse(http: web.Request) -> web.Response:
    """What ABSENT says of this route."""
    raise BadRequest(f"{http.path} is not supported: {ABSENT[http.path]}")
