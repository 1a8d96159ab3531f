"""The watchdog: detects an engine whose scheduler hangs while its HTTP server answers, or that is suspended.

A sign of life is a generated token, or any change in the figures of its scheduler. Either is enough, so that a busy
engine is not considered dead: its answer may be late, but its figures change at every step. While it is paused for a
weight update, any answer is a sign of life; the update has its own timeout. Without a sign for `hang_s` the engine is
lost.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from protocol.messages import NodeState
from protocol.runtime.timing import LoopClock
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import TOO_MANY_FILES, EngineError
from rollout_server.metrics import Stats
from rollout_server.node.config import NodeSettings
from rollout_server.node.status import EngineStatus
from rollout_server.node.weights.follower import EngineLost, report_lost

log = logging.getLogger(__name__)

SHORTEST_LOOK_S = 0.2


class EngineHung(EngineLost):
    """The engine runs but does not respond. It would not react to SIGTERM either."""


class Watchdog:
    """Watches one incarnation of an engine. `swap_lock` is held while the node has paused it."""

    def __init__(
        self, client: EngineAdmin, status: EngineStatus, settings: NodeSettings, stats: Stats, swap_lock: asyncio.Lock
    ) -> None:
        self._client, self._status, self._settings = client, status, settings
        self._stats, self._swap_lock = stats, swap_lock
        self._figures: Any = None

    async def watch(self) -> None:
        """Consume signs of life; produce EngineLost; wait probe_s between probes; ended by cancellation.

        Only the time of probes counts as silence, so a suspension of the node is not attributed to the engine.
        """
        settings, silent_s, refused, now = self._settings, 0.0, 0, LoopClock.current().time
        while True:
            await asyncio.sleep(settings.probe_s)
            left_s = settings.hang_s - silent_s - settings.probe_s
            timeout_s = min(settings.probe_timeout_s, max(SHORTEST_LOOK_S, left_s))
            began, swapping = now(), self._swap_lock.locked()
            # one that waits for a complete version may be paused until then, and a paused SGLang reports unhealthy
            silent = swapping or (self._status.state is NodeState.QUARANTINED and self._status.needs_broadcast)
            error = await (self._responds(timeout_s) if silent else self._probe(timeout_s))
            if error is None or error.cause == TOO_MANY_FILES or swapping != self._swap_lock.locked():
                silent_s, refused = 0.0, 0
                continue
            silent_s += settings.probe_s + min(timeout_s, now() - began)
            refused = refused + 1 if error.cause == "unreachable" else 0
            self._stats.counts["strikes"] += 1
            log.warning("no sign of life from the engine for %.1f s: %s", silent_s, error)
            # if it is lost during an update, it may hold a mix of two versions
            tainted = swapping or self._status.state is NodeState.QUARANTINED
            state = NodeState.QUARANTINED if tainted else NodeState.SUSPECT
            if refused >= settings.probe_failures:
                raise report_lost(self._status, state, f"gone: {error}") from error
            if silent_s >= settings.hang_s:
                self._stats.counts["hangs"] += 1
                self._status.transition_to(state, f"hung: no sign of life for {silent_s:.1f} s: {error}")
                raise EngineHung(self._status.detail) from error

    async def _responds(self, timeout_s: float) -> EngineError | None:
        """Return None if the engine answers, else the error."""
        try:
            await self._client.model_info(timeout_s=timeout_s)
        except EngineError as error:
            return error
        return None

    async def _probe(self, timeout_s: float) -> EngineError | None:
        """Return None for a sign of life, else the error of the generation."""
        failure, figures = await asyncio.gather(self._generates(timeout_s), self._scheduler(timeout_s))
        moved = None not in (figures, self._figures) and figures != self._figures
        self._figures = figures or self._figures
        return None if moved else failure

    async def _generates(self, timeout_s: float) -> EngineError | None:
        try:
            await self._client.health(timeout_s=timeout_s)
        except EngineError as error:
            return error
        return None

    async def _scheduler(self, timeout_s: float) -> Any:
        try:
            return await self._client.scheduler_figures(timeout_s=timeout_s)
        except EngineError:
            return None  # not a sign of life; the probe checks for others
