"""Status of an engine: one mutable record, written by the agent, registered in Redis at every change."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from protocol.errors import UserError
from protocol.messages import NEEDS_BROADCAST, EngineInfo, NodeState
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis.aio import Backoff
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.timing import PATIENCE
from protocol.versions import PolicyVersion
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError
from rollout_server.engine.client import CONTROL_TIMEOUT_S
from rollout_server.node.registry import Registry

log = logging.getLogger(__name__)

NO_VERSION = PolicyVersion(0, 0)
"""Version of an engine launched with the run's initial model before any version was published."""


SGLANG_RETRACTIONS = "sglang:num_retracted_requests_total"
"""Counter in SGLang's /metrics (--enable-metrics): its /v1/loads has only the current retractions."""


def _taken(engine_id: str) -> UserError:
    return UserError(
        f"another node has registered the engine {engine_id}",
        why="it keeps renewing the registration, and two engines cannot share an id",
        todo="set another engine.id for this node, or stop the other one",
    )


class EngineStatus:
    """State, version and load of one engine. `transition_to` is the only way to change the first two."""

    def __init__(self, fixed: EngineInfo) -> None:
        """fixed  constant fields: id, url, role, tokenizer; and initial values of those set by `update_capabilities`"""
        self._fixed = fixed
        self.state = NodeState.JOINING
        self.version = NO_VERSION
        self.detail = ""
        self.incarnation = ""
        self.ready_incarnation = ""
        """Incarnation in which it was last READY."""
        self.loads: dict[str, float] = {}
        self.pause_s = self.load_s = 0.0
        self.start_s = self.silence_s = 0.0
        """Seconds of its start, and of its longest recent silence that ended well or still lasts."""
        self.updates = 0
        self.needs_recheck = False
        """The registration had expired: the engine is not READY before its version has been checked again."""
        self._changed = asyncio.Event()
        self.registered = asyncio.Event()
        """Set once the engine has been registered."""

    @property
    def id(self) -> str:
        return self._fixed.id

    @property
    def pace_s(self) -> float:
        """Seconds of its slowest recent step, the one in progress included: its own figure, or its silence."""
        return max(0.0, self.loads.get("pace_s", 0.0) or self.silence_s)

    @property
    def needs_broadcast(self) -> bool:
        """Whether it waits for a broadcast, since this host does not have the announced files."""
        return self.detail.startswith(NEEDS_BROADCAST)

    def transition_to(self, state: NodeState, detail: str = "", *, version: PolicyVersion | None = None) -> None:
        """Change the state and register it at once. A draining engine stays draining."""
        if self.state is NodeState.DRAINING:
            return
        version = self.version if version is None else version
        if (state, version, detail) != (self.state, self.version, self.detail):
            log.info("%s: %s at %s%s", self.id, state, version.label, f": {detail}" if detail else "")
        self.state, self.version, self.detail = state, version, detail[:2000]
        if state is NodeState.READY:
            self.ready_incarnation = self.incarnation
        self._changed.set()

    def update_capabilities(self, facts: Mapping[str, Any]) -> None:
        """Set the fields of EngineInfo that the engine reports."""
        self._fixed = self._fixed.model_copy(update=dict(facts))
        self._changed.set()

    def info(self) -> EngineInfo:
        return self._fixed.model_copy(
            update={
                "state": self.state,
                "epoch": self.version.epoch,
                "step": self.version.step,
                "incarnation": self.incarnation,
                "running": int(self.loads.get("running", 0)),
                "waiting": int(self.loads.get("waiting", 0)),
                "tokens_per_s": max(0.0, self.loads.get("tokens_per_s", 0.0)),
                "token_usage": max(0.0, self.loads.get("token_usage", 0.0)),
                "retractions": int(self.loads.get("retractions", 0)),
                "pace_s": self.pace_s,
                "updates": self.updates,
                "pause_s": self.pause_s,
                "detail": self.detail,
            }
        )

    def limit_s(self, floor_s: float) -> float:
        """Return the limit of a call that the engine answers between two steps, in seconds."""
        return max(floor_s, PATIENCE * self.pace_s)

    def update_limit_s(self, floor_s: float) -> float:
        """Return the limit of a call that loads weights: the start of the engine has loaded as many."""
        return max(floor_s, PATIENCE * max(self.start_s, self.load_s))

    async def heartbeat_loop(self, registry: Registry, waits: WaitTimer, *, every_s: float) -> None:
        """Consume changes of this record; produce registrations; wait every_s or for a change; ends cancelled.

        Raises UserError if another node has held the engine's id for longer than a registration outlives its node.
        A node that was suspended or disconnected from Redis for longer than its lease may have missed changes: a new
        epoch may have started, and the engine may have been suspended, restarted, or updated by others.
        """
        backoff = Backoff("registering the engine", waits, longest_s=every_s)
        renewed, refused = time.monotonic(), 0.0
        while True:
            if (away_s := time.monotonic() - renewed) > registry.lease_s and self.state is NodeState.READY:
                self.needs_recheck = True
                self.transition_to(
                    NodeState.SYNCING, f"its registration had expired: it was last renewed {away_s:.1f} s ago"
                )
            self._changed.clear()
            asked = time.monotonic()
            try:
                ours = await registry.register(self.info())
            except RedisUnavailable as error:
                await backoff.sleep(error)
                continue
            backoff.reset()
            if not ours:
                refused = refused or asked
                if asked - refused > registry.lease_s + every_s:
                    raise _taken(self.id)
                log.warning("another node has registered the engine %s: waiting for the end of its lease", self.id)
                await asyncio.sleep(every_s)
                continue
            renewed, refused = asked, 0.0
            self.registered.set()
            if time.monotonic() - asked > registry.lease_s:
                continue  # suspended while registering: what was written is outdated
            try:
                async with asyncio.timeout(every_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def poll_loads(self, client: EngineAdmin, *, every_s: float) -> None:
        """Consume the load figures of the engine; produce `loads`; wait every_s; ended by cancellation."""
        while True:
            try:
                self.loads = await client.loads()
                client.set_control_limit(self.limit_s(CONTROL_TIMEOUT_S))
            except EngineError as error:
                log.debug("no load figures: %s", error)  # the watchdog decides whether it is healthy
                self.loads = {}
            if self._fixed.kind == "sglang":
                self.loads |= await self._retractions(client)
            await asyncio.sleep(every_s)

    async def _retractions(self, client: EngineAdmin) -> dict[str, float]:
        try:
            return {"retractions": await client.counter(SGLANG_RETRACTIONS)}
        except EngineError as error:
            log.debug("no count of retractions: %s", error)  # an attached engine may have no metrics
            return {}
