"""The agent beside one engine: one incarnation of it after another, until the node is asked to stop.

             launch                healthy            target is newer and verified, no evaluation runs
JOINING ----------------> SYNCING ---------> READY <----------------------------------+
                             ^                 |                                      |
    restart with back-off    |                 +--> LOADING: pause, update, read back, continue
    (ours; an attached one   |                 |           |
    is GONE until it answers |     dies,       v           | fails after it began
    and is loaded again)     +--<--  hangs: SUSPECT        v
                             +--<---------------------- QUARANTINED
SIGTERM in any state: DRAINING, then gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from protocol.errors import UserError
from protocol.messages import NodeState, WeightUpdate
from protocol.runtime.http.auth import read_access
from protocol.runtime.redis.aio import Backoff, retry_until_available
from protocol.settings import RunSettings
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError
from rollout_server.metrics import Stats
from rollout_server.node.attach import validate_engine
from rollout_server.node.capabilities import read_capabilities
from rollout_server.node.config import AttachedEngine, CpuEngine, NodeSettings, SglangEngine
from rollout_server.node.process import STOP_S, EngineKeys, EngineProcess, check_host, command, environment, new_keys
from rollout_server.node.registry import Registry
from rollout_server.node.status import NO_VERSION, EngineStatus
from rollout_server.node.watchdog import EngineHung, Watchdog
from rollout_server.node.weights.follower import EngineLost, WeightFollower, report_lost
from rollout_server.node.weights.manifest import WeightsCorrupt, verify

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
STABLE_AFTER_S = 60.0
"""An engine that lived so long has earned a quick restart."""
NOTICE_S = 1.0
"""How long rollout servers may take to notice that an engine drains: they look twice a second."""
LEFT_PAUSED = "it was left paused in the middle of an update: it goes on when a version has been loaded whole"
HAND_BACK_S = 3.0
"""How long the partial outputs of a drained engine may take to reach their clients."""


class Agent:
    """See the module. `run` runs until it is cancelled, `drain` before that makes the end an orderly one."""

    def __init__(
        self,
        run: RunSettings,
        settings: NodeSettings,
        registry: Registry,
        stats: Stats,
        session: aiohttp.ClientSession,
        status: EngineStatus,
        *,
        url: str,
        port: int,
    ) -> None:
        self._run, self._settings, self._registry, self._stats = run, settings, registry, stats
        self._status, self._url, self._port = status, url, port
        self._client = EngineAdmin(session, url, name=status.id)
        self._access = read_access(os.environ)
        if not isinstance(settings.kind, AttachedEngine):
            check_host(settings.host, self._access)
        self._validated = self._tainted = False
        self._follower = WeightFollower(status, registry, settings, stats)

    async def run(self) -> None:
        """Consumes incarnations of the engine; produces a READY one; waits with back-off between them.

        Raises UserError when the very first launch fails: an operator has to act. Else ended by cancellation.
        """
        backoff = FIRST_BACKOFF_S
        while True:
            born = time.monotonic()
            # A separate task: a group that is cancelled while one of its tasks fails raises that error alone, and
            # the loop would go on although it was cancelled.
            life = asyncio.create_task(self._run_incarnation(), name="engine")
            try:
                await asyncio.wait({life})
            finally:
                life.cancel()
                await asyncio.wait({life})
            life.result()
            if time.monotonic() - born > STABLE_AFTER_S:
                backoff = FIRST_BACKOFF_S
            await asyncio.sleep(backoff)
            backoff = min(LONGEST_BACKOFF_S, 2 * backoff)

    async def _run_incarnation(self) -> None:
        """One incarnation from its launch to its loss, or to our cancellation. Raises UserError as `run` does."""
        try:
            async with self._incarnation() as child, asyncio.TaskGroup() as tasks:
                every_s = self._settings.heartbeat_s
                tasks.create_task(self._follower.follow(self._client), name="follow")
                tasks.create_task(self._status.poll_loads(self._client, every_s=every_s), name="measure")
                watchdog = Watchdog(self._client, self._status, self._settings, self._stats, self._follower.swap_lock)
                tasks.create_task(watchdog.watch(), name="watchdog")
                tasks.create_task(self._exit(child), name="exit")
        except* EngineLost:
            self._stats.counts["restarts"] += not isinstance(self._settings.kind, AttachedEngine)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Take no more traffic, let what runs finish for drain_s or until `hurry`, and hand back what is left."""
        deadline = time.monotonic() + self._settings.drain_s
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._follower.swap_lock.acquire()  # and keep it: nothing is swapped any more
        except TimeoutError:
            log.warning("draining in the middle of a weight update that does not end")
        booted = self._status.state in (NodeState.READY, NodeState.LOADING, NodeState.QUARANTINED)
        self._status.transition_to(NodeState.DRAINING)
        try:
            if not booted or await self._wait_idle(deadline, since=time.monotonic() + NOTICE_S, hurry=hurry):
                return
            if isinstance(self._settings.kind, AttachedEngine):
                log.info("requests are in flight on an engine that goes on without us: they finish there")
                return
            log.info("ending the requests in flight: they go on elsewhere with the tokens they have")
            await self._client.abort(everything=True)
            await self._wait_idle(time.monotonic() + HAND_BACK_S, since=0.0)
        except EngineError as error:
            log.info("draining ends early: %s", error)

    async def _wait_idle(self, deadline: float, *, since: float, hurry: asyncio.Event | None = None) -> bool:
        """Whether nothing runs or waits any more, after `since` and before `deadline` or `hurry`; waits for it."""
        while time.monotonic() < deadline and not (hurry and hurry.is_set()):
            loads = await self._client.loads()
            if time.monotonic() > since and loads["running"] + loads["waiting"] == 0:
                return True
            await asyncio.sleep(0.1)
        return False

    @asynccontextmanager
    async def _incarnation(self) -> AsyncIterator[EngineProcess | None]:
        """A healthy engine for the time of the block, None for an attached one. Raises EngineLost."""
        status, kind = self._status, self._settings.kind
        # what is left of a half-loaded version must be loaded again, whatever it calls itself
        unsound = self._tainted and status.ready_incarnation != status.incarnation
        self._tainted = unsound or status.state is NodeState.QUARANTINED
        why = status.detail if self._tainted else LEFT_PAUSED
        status.incarnation = secrets.token_hex(4)
        status.loads = {}
        status.transition_to(NodeState.SYNCING, version=NO_VERSION)
        wanted = await self._read_target()
        if isinstance(kind, AttachedEngine):
            await self._wait_for_attached(kind, paused=self._tainted)
            if self._tainted:
                status.transition_to(NodeState.QUARANTINED, why)
            else:
                await self._read_version()
            yield None
            return
        keys = new_keys(self._access, status.id, status.incarnation)
        child, model = await self._launch(kind, wanted, keys)
        self._client.use_keys(keys.api, keys.admin)
        grace_s = STOP_S
        try:
            await self._wait_healthy(child, model)
            await self._read_version()
            yield child
        except* EngineHung:
            grace_s = 0.0  # it does not listen
            raise
        finally:
            await child.stop(grace_s=grace_s)

    async def _launch(
        self, kind: CpuEngine | SglangEngine, wanted: WeightUpdate | None, keys: EngineKeys
    ) -> tuple[EngineProcess, Path]:
        """Start the engine. Return it, and the directory that it serves."""
        status = self._status
        if wanted is not None:
            # Said before it is read: the learner removes old versions, but none that an engine reports.
            status.transition_to(NodeState.SYNCING, "reading", version=wanted.version)
        model, label = await self._weights(wanted)
        status.transition_to(NodeState.SYNCING, f"launching with {label}")

        def argv(home: Path) -> list[str]:
            return command(
                kind,
                model=model,
                label=label,
                host=self._settings.host,
                port=self._port,
                keys=keys,
                home=home,
                in_place=self._settings.pause_mode == "in_place",
                day=self._run.date,
            )

        log_path = (self._run.dir / "logs" / f"{status.id}.engine.log").resolve()
        return await EngineProcess.start(argv, environment(kind, keys), log_path), model

    async def _read_target(self) -> WeightUpdate | None:
        """The target, unless it is of a refused epoch."""
        backoff = Backoff("reading the target", self._stats.waits)
        update: WeightUpdate | None = await retry_until_available(backoff, self._registry.target)
        return update if update is not None and self._follower.should_load(update) else None

    async def _weights(self, wanted: WeightUpdate | None) -> tuple[Path, str]:
        """(directory, label) to launch with: the target where there is a sound one, the run's model otherwise.

        An adapter is loaded over the run's model once the engine is up.
        """
        if wanted is not None and wanted.transport != "adapter":
            try:
                return (await asyncio.to_thread(verify, wanted)).resolve(), wanted.version.label
            except WeightsCorrupt as error:
                log.error("launching with the initial model: %s", error)
        model = self._run.model.resolve()
        if not (model / "config.json").is_file():
            raise UserError(
                f"there is no model at {self._run.model}",
                why=f"{model / 'config.json'} does not exist",
                todo="set run.model to a directory in Hugging Face layout",
            )
        return model, NO_VERSION.label

    async def _wait_for_attached(self, kind: AttachedEngine, *, paused: bool) -> None:
        """Waits until the attached engine answers soundly; GONE meanwhile. Raises UserError when it is the wrong one.

        paused  it was left in the middle of a swap, and would call itself unhealthy for that alone. One that another
                node left so (it was killed) is found out by being paused for longer than a start takes.
        """
        if not self._validated:
            await validate_engine(self._client, self._url, self._run.model, wait_s=kind.wait_s)
        self._validated = True
        paused_since = 0.0
        while True:
            try:
                if paused:
                    await self._client.model_info()
                else:
                    await self._client.health(timeout_s=self._settings.probe_timeout_s)
                return
            except EngineError as error:
                self._status.transition_to(NodeState.GONE, f"waiting for it: {error}")
            if paused or not await self._client.paused():
                paused_since = 0.0
            elif not paused_since:
                paused_since = time.monotonic()
            elif time.monotonic() - paused_since >= kind.wait_s:
                # What paused it is gone, perhaps in the middle of loading: its label is no proof of its weights.
                log.warning("%s stays paused: the target will be loaded whole", self._url)
                self._tainted = paused = True
                self._stats.counts["found_paused"] += 1
            await asyncio.sleep(min(1.0, self._settings.probe_s))

    async def _wait_healthy(self, child: EngineProcess, model: Path) -> None:
        """Waits for the first sound answer of the engine that was launched with `model`.

        Raises EngineLost at the deadline or when it exits.
        """
        deadline = time.monotonic() + self._settings.start_timeout_s
        while True:
            try:
                await self._client.health(timeout_s=self._settings.probe_timeout_s)
                return
            except EngineError as error:
                if child.exited.done():
                    raise self._start_failure(child, model) from None
                if time.monotonic() > deadline:
                    raise report_lost(self._status, NodeState.SUSPECT, f"not healthy in time: {error}") from None
            await asyncio.sleep(0.1)

    def _start_failure(self, child: EngineProcess, model: Path) -> Exception:
        what = f"the engine ended with status {child.returncode} before it answered"
        if not model.is_dir():
            # The learner was faster than the launch and has removed that version: the newest one is tried next.
            return report_lost(self._status, NodeState.SUSPECT, f"{what}: its weights are gone")
        if self._stats.counts["restarts"] or self._status.updates:
            return report_lost(self._status, NodeState.SUSPECT, what)
        return UserError(what, why=f"the end of {child.log_path}:\n{child.tail()}", todo="correct that and start again")

    async def _read_version(self) -> None:
        """READY at the version that the engine says it holds, or SYNCING where that is not of the living epoch."""
        try:
            self._status.update_capabilities(
                await read_capabilities(self._client, pause_mode=self._settings.pause_mode)
            )
            held = await self._client.version() or NO_VERSION
        except EngineError as error:
            raise report_lost(self._status, NodeState.SUSPECT, str(error)) from None
        current = held.epoch == self._follower.highest_epoch
        self._status.transition_to(NodeState.READY if current else NodeState.SYNCING, version=held)

    async def _exit(self, child: EngineProcess | None) -> None:
        """Raises EngineLost when the engine exits. An attached one has only the watchdog."""
        if child is not None:
            status = await child.wait()
            raise report_lost(self._status, NodeState.SUSPECT, f"the engine ended with status {status}")
