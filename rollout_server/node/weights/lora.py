"""Versions that come as LoRA adapters: loaded beside the initial model's weights, named after their version.

Nothing pauses: a request names the adapter it wants, and those in flight keep theirs. So an adapter is unloaded only
when newer ones have taken its place for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time

from protocol.messages import NodeState, WeightUpdate
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError
from rollout_server.metrics import Stats
from rollout_server.node.config import NodeSettings
from rollout_server.node.status import NO_VERSION, EngineStatus

log = logging.getLogger(__name__)

UNLOAD_S = 60.0
"""How long SGLang may wait for the last request of an adapter; it stays until the next turn then."""


class AdapterLoader:
    """The adapters of one incarnation of an engine."""

    def __init__(self, client: EngineAdmin, status: EngineStatus, settings: NodeSettings, stats: Stats) -> None:
        self._client, self._status, self._settings, self._stats = client, status, settings, stats
        self._loaded: list[str] = []
        """Names, oldest first."""
        self._unloading: asyncio.Task[None] | None = None
        status.update_capabilities({"adapter": ""})

    async def load(self, update: WeightUpdate) -> bool:
        """Load `update`, which is verified, and make it the engine's version. False: nothing has changed."""
        status, label = self._status, update.version.label
        began = time.monotonic()
        status.transition_to(status.state, f"reading {label}")
        try:
            held = await self._client.version()
            if held is not None and held != NO_VERSION:
                raise EngineError(
                    "refused", self._client.name, f"it holds the weights of {held.label}, not the initial model's"
                )
            await self._client.load_adapter(label, update.path, timeout_s=self._settings.update_timeout_s)
        except EngineError as error:
            self._stats.counts["strikes"] += 1
            status.transition_to(status.state, f"adapter {label} is not loaded: {error}")
            return False
        status.pause_s, status.load_s = 0.0, time.monotonic() - began
        status.updates += 1
        self._stats.counts["updates"] += 1
        status.update_capabilities({"adapter": label})
        status.transition_to(NodeState.READY, version=update.version)
        self._loaded = [name for name in self._loaded if name != label] + [label]
        if self._unloading is None or self._unloading.done():
            self._unloading = asyncio.create_task(self._unload(), name="unload adapters")
        log.info("adapter %s loaded in %.3f s, without a pause", label, status.load_s)
        return True

    def close(self) -> None:
        """Ends what goes on in the background."""
        if self._unloading is not None:
            self._unloading.cancel()

    async def _unload(self) -> None:
        """All but the newest `keep_adapters`: rollout servers learn of a version a moment later than the node."""
        while len(self._loaded) > self._settings.keep_adapters:
            name = self._loaded[0]
            try:
                await self._client.unload_adapter(name, timeout_s=UNLOAD_S)
            except EngineError as error:
                log.warning("adapter %s is not unloaded: %s", name, error)
                if error.cause == "timeout":
                    return  # still in use: after the next version
            self._loaded.remove(name)
