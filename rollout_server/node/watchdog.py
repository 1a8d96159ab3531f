"""The watchdog: detects an engine whose scheduler hangs while its HTTP server answers, or that is suspended.

A sign of life is a generated token, or progress of its scheduler: layers that the CPU engine has computed, figures
that SGLang changes at the end of a step. Either is enough, so that a busy engine is not considered dead: its answer may
be late, but a step ends. While it is paused for a weight update, any answer is a sign of life; the update has its own
limit. CPU time is no sign: a thread that spins computes nothing.

An engine is lost after a silence of PATIENCE times the longest recent one that ended well, or its first token, which
was measured at its start, compilation included (`first_s`); and not before the floor (`hang_s`). Within a step SGLang
shows nothing: the first token stands for that, and a floor as long as SGLang's own watchdog has.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from protocol.messages import NodeState
from protocol.runtime.timing import PATIENCE, LoopClock
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import TOO_MANY_FILES, EngineError
from rollout_server.metrics import Stats
from rollout_server.node.config import NodeSettings
from rollout_server.node.status import EngineStatus
from rollout_server.node.weights.follower import EngineLost, report_lost

log = logging.getLogger(__name__)

MAX_REFUSED = 3
"""An engine that refuses this many connections in a row is gone: the kernel refuses where nothing listens."""
SHORTEST_LOOK_S = 0.2
FLOOR_S, STEP_FLOOR_S = 30.0, 300.0
"""Default of `engine.hang_s`: for an engine that counts layers, and for one that shows nothing within a step."""
RECENT, LATEST = 1000, 30
"""Number of signs of life whose silences are remembered for the limit (half an hour with the default `engine.probe_s`),
and for the reported pace of the engine."""


class EngineHung(EngineLost):
    """The engine runs but does not respond. It would not react to SIGTERM either."""


class Watchdog:
    """Watches one incarnation of an engine. `swap_lock` is held while the node has paused it.

    first_s  seconds of its first token
    """

    def __init__(
        self,
        client: EngineAdmin,
        status: EngineStatus,
        settings: NodeSettings,
        stats: Stats,
        swap_lock: asyncio.Lock,
        first_s: float = 0.0,
    ) -> None:
        self._client, self._status, self._settings = client, status, settings
        self._stats, self._swap_lock, self._first_s = stats, swap_lock, first_s
        self._silences: deque[float] = deque([0.0], RECENT)
        self._figures: Any = None

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which the engine is lost."""
        floor_s = self._settings.hang_s or (FLOOR_S if self._status.info().kind == "cpu" else STEP_FLOOR_S)
        return max(floor_s, PATIENCE * max(self._first_s, *self._silences))

    @property
    def _latest_s(self) -> float:
        return max(list(self._silences)[-LATEST:])

    async def watch(self) -> None:
        """Consume signs of life; produce EngineLost; wait probe_s between probes; ended by cancellation.

        Only the time of probes counts as silence, so a suspension of the node is not attributed to the engine.
        """
        settings, silent_s, refused, now = self._settings, 0.0, 0, LoopClock.current().time
        while True:
            await asyncio.sleep(settings.probe_s)
            left_s = self.limit_s - silent_s - settings.probe_s
            timeout_s = min(settings.probe_timeout_s, max(SHORTEST_LOOK_S, left_s))
            began, swapping = now(), self._swap_lock.locked()
            # one that waits for a complete version may be paused until then, and a paused SGLang reports unhealthy
            silent = swapping or (self._status.state is NodeState.QUARANTINED and self._status.needs_broadcast)
            error = await (self._responds(timeout_s) if silent else self._probe(timeout_s))
            if error is None or error.cause == TOO_MANY_FILES or swapping != self._swap_lock.locked():
                self._silences.append(0.0 if silent else silent_s)
                silent_s, refused = 0.0, 0
                self._status.silence_s = self._latest_s
                continue
            silent_s += settings.probe_s + min(timeout_s, now() - began)
            self._status.silence_s = max(silent_s, self._latest_s)
            refused = refused + 1 if error.cause == "unreachable" else 0
            self._stats.counts["strikes"] += 1
            limit_s = self.limit_s
            level = logging.WARNING if silent_s > limit_s / 2 else logging.DEBUG  # a slow one is silent often
            log.log(level, "no sign of life from the engine for %.1f s (limit %.0f s): %s", silent_s, limit_s, error)
            # if it is lost during an update, it may hold a mix of two versions
            tainted = swapping or self._status.state is NodeState.QUARANTINED
            state = NodeState.QUARANTINED if tainted else NodeState.SUSPECT
            if refused >= MAX_REFUSED:
                raise report_lost(self._status, state, f"gone: {error}") from error
            if silent_s >= limit_s:
                self._stats.counts["hangs"] += 1
                what = f"hung: no sign of life for {silent_s:.1f} s (limit {limit_s:.0f} s): {error}"
                self._status.transition_to(state, what)
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
