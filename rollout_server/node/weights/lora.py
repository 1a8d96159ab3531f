"""Load versions that are LoRA adapters, in addition to the initial model's weights, named after their version.

Generation is not paused: each request names its adapter, and requests in flight keep theirs. An adapter is therefore
unloaded only some versions later.
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

KEEP_ADAPTERS = 2
"""LoRA adapters that stay loaded, the newest ones: requests with an older one may still run."""
UNLOAD_S = 60.0
"""Timeout for unloading in SGLang, which waits for the last request of the adapter; then it is tried again later."""


class AdapterLoader:
    """The adapters of one incarnation of an engine."""

    def __init__(self, client: EngineAdmin, status: EngineStatus, settings: NodeSettings, stats: Stats) -> None:
        self._client, self._status, self._settings, self._stats = client, status, settings, stats
        self._loaded: list[str] = []
        """Names of the loaded adapters, oldest first."""
        self._swept = False
        self._unloading: asyncio.Task[None] | None = None
        status.update_capabilities({"adapter": ""})

    async def load(self, update: WeightUpdate) -> bool:
        """Load the verified `update` as the engine's version. Return False if nothing has changed."""
        status, label = self._status, update.version.label
        began = time.monotonic()
        status.transition_to(status.state, f"reading {label}")
        try:
            held = await self._client.version()
            if held is not None and held != NO_VERSION:
                raise EngineError(
                    "refused",
                    self._client.name,
                    f"it holds the weights of {held.label}, not those of the initial model",
                )
            if not self._swept:
                await self._sweep()
            limit_s = status.update_limit_s(self._settings.update_timeout_s)
            await self._client.load_adapter(label, update.path, timeout_s=limit_s)
        except EngineError as error:
            self._stats.counts["strikes"] += 1
            status.transition_to(status.state, f"could not load adapter {label}: {error}")
            return False
        status.pause_s, status.load_s = 0.0, time.monotonic() - began
        status.updates += 1
        self._stats.counts["updates"] += 1
        status.update_capabilities({"adapter": label})
        status.transition_to(NodeState.READY, version=update.version)
        self._loaded = [name for name in self._loaded if name != label] + [label]
        if self._unloading is None or self._unloading.done():
            self._unloading = asyncio.create_task(self._unload(), name="unload adapters")
        log.info("loaded adapter %s in %.3f s, without a pause", label, status.load_s)
        return True

    async def _sweep(self) -> None:
        """Unload the versions that the engine has from before, of a killed node or another run."""
        for name in await self._client.adapter_versions():
            await self._client.unload_adapter(name, timeout_s=self._status.limit_s(UNLOAD_S))
            log.info("unloaded adapter %s, which was there before", name)
        self._swept = True

    def close(self) -> None:
        """Stop unloading in the background."""
        if self._unloading is not None:
            self._unloading.cancel()

    async def _unload(self) -> None:
        """Unload all but the newest KEEP_ADAPTERS: rollout servers see a new version slightly later than the node."""
        while len(self._loaded) > KEEP_ADAPTERS:
            name = self._loaded[0]
            try:
                await self._client.unload_adapter(name, timeout_s=self._status.limit_s(UNLOAD_S))
            except EngineError as error:
                log.warning("could not unload adapter %s: %s", name, error)
                if error.cause == "timeout":
                    return  # still in use: try again after the next version
            self._loaded.remove(name)
