"""Routes that load and unload LoRA adapters, and the table of loaded adapters.

Deviations from SGLang: no flag is needed. Requests that use an adapter continue with it after it is unloaded (in SGLang
the unload call waits for them). Unknown adapters are never loaded automatically.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout_server.cpu_engine.model.loader import WeightsError
from rollout_server.cpu_engine.model.lora import Adapter, read_adapter
from rollout_server.cpu_engine.scheduler.engine import Engine
from rollout_server.cpu_engine.server.validation import BadRequest, read_object, required


class LoraRoutes:
    """Handlers. Used on the event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded: dict[str, Adapter | None] = {}  # None: being read

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/load_lora_adapter", self.load),
            web.post("/unload_lora_adapter", self.unload),
        ]

    def named(self, name: str) -> Adapter | None:
        """Return the adapter of a request; None for "". Raises BadRequest if it is not loaded."""
        if not name:
            return None
        adapter = self._loaded.get(name)
        if adapter is None:
            known = ", ".join(self.table()) or "none"
            raise BadRequest(f"Got LoRA adapter that has never been loaded: {name}. All loaded adapters: {known}.")
        return adapter

    def table(self) -> dict[str, str]:
        """Return the loaded adapters: name -> path."""
        return {name: str(adapter.path) for name, adapter in self._loaded.items() if adapter is not None}

    async def load(self, http: web.Request) -> web.Response:
        """Load an adapter, outside the engine thread. `pinned` is ignored: adapters are never evicted."""
        body = await read_object(http)
        name, path = required(body, "lora_name", str), required(body, "lora_path", str)
        if name in self._loaded:
            return self._answer(f"LoRA adapter with name {name} is already loaded")
        self._loaded[name] = None
        try:
            adapter = await asyncio.to_thread(read_adapter, name, Path(path), self._engine.weights)
        except WeightsError as error:
            del self._loaded[name]
            return self._answer(str(error))
        except BaseException:
            del self._loaded[name]
            raise
        self._loaded[name] = adapter
        return self._answer()

    async def unload(self, http: web.Request) -> web.Response:
        """Unload an adapter. Its name can be reused at once."""
        name = required(await read_object(http), "lora_name", str)
        if self._loaded.get(name) is None:
            return self._answer(f"LoRA adapter with name {name} does not exist")
        del self._loaded[name]
        return self._answer()

    def _answer(self, error: str | None = None) -> web.Response:
        body: dict[str, Any] = {"success": error is None, "error_message": error, "loaded_adapters": self.table()}
        if error is not None:
            body |= {"message": error, "error": {"message": error}}
        return web.json_response(body, status=200 if error is None else 400)
