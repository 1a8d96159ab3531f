"""The agent of one engine: runs its incarnations one after another, until the node is stopped.

             launch                healthy            target is newer and verified, no evaluation runs
JOINING ----------------> SYNCING ---------> READY <----------------------------------+
                             ^                 |                                      |
    restart with back-off    |                 +--> LOADING: pause, update, read back, continue
    (ours; an attached one   |                 |           |
    is GONE until it answers |     dies,       v           | fails after it started
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
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from protocol import events
from protocol.errors import UserError
from protocol.messages import NodeState, WeightUpdate
from protocol.runtime.http.auth import read_access
from protocol.runtime.http.body import read_start
from protocol.runtime.redis.aio import Backoff, retry_until_available
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.redis.url import parse_redis_url
from protocol.runtime.service_cli import describe_exit
from protocol.runtime.timing import LoopClock, backoff_s
from protocol.runtime.torch_safety import interface_variables
from protocol.settings import RunSettings
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError
from rollout_server.metrics import Stats
from rollout_server.node.attach import validate_engine
from rollout_server.node.capabilities import read_capabilities
from rollout_server.node.config import AttachedEngine, CpuEngine, NodeSettings, SglangEngine
from rollout_server.node.guard import Growth, memory_mib
from rollout_server.node.process import (
    STOP_S,
    EngineKeys,
    EngineProcess,
    check_host,
    command,
    environment,
    installed_versions,
    new_keys,
    seed_of,
    tail,
)
from rollout_server.node.registry import Registry
from rollout_server.node.status import NO_VERSION, EngineStatus
from rollout_server.node.watchdog import EngineHung, Watchdog
from rollout_server.node.weights.follower import EngineLost, WeightFollower, report_lost
from rollout_server.node.weights.manifest import WeightsCorrupt, verify

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
STABLE_AFTER_S = 60.0
"""An engine that ran for this long is restarted without back-off."""
RELAUNCHES_S = 3600.0
"""Period of `engine.relaunches`."""
NOTICE_S = 1.0
"""Time for rollout servers to notice that an engine drains: they poll twice a second."""
PREEMPTED_S = 1.0
"""Timeout for an answer of `engine.preempted`, which is on the same machine."""
LEFT_PAUSED = "it was left paused during an update; it continues when a complete version has been loaded"
HAND_BACK_S = 3.0
"""Time for the partial outputs of a drained engine to reach their clients."""


async def is_preempted(notice: str, session: aiohttp.ClientSession) -> bool:
    """Return whether the machine will be taken away, as the file or URL `notice` says. No answer: no."""
    if "://" not in notice:
        return bool(notice) and Path(notice).exists()
    try:
        # Google's metadata server requires the header; it answers FALSE until then, Amazon's 404
        async with asyncio.timeout(PREEMPTED_S), session.get(notice, headers={"Metadata-Flavor": "Google"}) as answer:
            return answer.status == 200 and (await read_start(answer, 100)).strip().upper() not in ("", "FALSE")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.debug("no answer from engine.preempted: %s", error)
        return False


class Agent:
    """Runs the engine. `run` runs until it is cancelled; call `drain` before that for an orderly stop."""

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
        self._client, self._session = EngineAdmin(session, url, name=status.id), session
        self._access = read_access(os.environ)
        if not isinstance(settings.kind, AttachedEngine):
            check_host(settings.host, self._access)
        self._lost: list[tuple[float, str]] = []
        """Time and reason of each loss of the last RELAUNCHES_S."""
        self._first_s = 0.0
        self._validated = self._tainted = self._booted = False
        self._unlaunchable: Path | None = None
        """Directory of the version with which the last launch failed."""
        self._drains = asyncio.Lock()
        self._follower = WeightFollower(status, registry, settings, stats, run.model)

    async def run(self) -> None:
        """Consume incarnations of the engine; produce a READY one; wait with back-off between them.

        Raises UserError if the first launch fails: an operator must act. Otherwise ended by cancellation.
        """
        await self._status.registered.wait()  # another node may own the id
        losses = 0
        while True:
            born = time.monotonic()
            # A separate task: a task group that is cancelled while one of its tasks fails raises only that error,
            # and the loop would continue although it was cancelled.
            life = asyncio.create_task(self._run_incarnation(), name="engine")
            try:
                await asyncio.wait({life})
            finally:
                life.cancel()
                await asyncio.wait({life})
            life.result()
            self._end_loop()
            losses = 1 if time.monotonic() - born > STABLE_AFTER_S else losses + 1
            await asyncio.sleep(backoff_s(losses, FIRST_BACKOFF_S, LONGEST_BACKOFF_S))

    def _end_loop(self) -> None:
        """Note a loss. Raises UserError after too many: the cause does not go away by another launch."""
        now, detail, log_path = time.monotonic(), self._status.detail, self._log_path
        self._lost = [one for one in self._lost if now - one[0] < RELAUNCHES_S] + [(now, detail)]
        if len(self._lost) <= self._settings.relaunches or isinstance(self._settings.kind, AttachedEngine):
            return
        causes = Counter(why.partition(":")[0] for _, why in self._lost)
        counted = ", ".join(f"{n} x {cause}" for cause, n in causes.items())
        raise UserError(
            f"engine {self._status.id} was lost {len(self._lost)} times within an hour, the last time: {detail}",
            why=f"{counted}; the end of {log_path}:\n{tail(log_path)}",
            todo=f"read {log_path} for the first of these losses; `foray doctor` checks the memory of this machine. "
            "engine.relaunches is the limit",
        )

    @property
    def _log_path(self) -> Path:
        return (self._run.dir / "logs" / f"{self._status.id}.engine.log").resolve()

    async def _run_incarnation(self) -> None:
        """Run one incarnation from launch to loss or cancellation. Raises UserError as `run` does."""
        try:
            async with self._incarnation() as child, asyncio.TaskGroup() as tasks:
                every_s = self._settings.heartbeat_s
                tasks.create_task(self._follower.follow(self._client), name="follow")
                tasks.create_task(self._status.poll_loads(self._client, every_s=every_s), name="measure")
                watchdog = Watchdog(
                    *(self._client, self._status, self._settings, self._stats, self._follower.swap_lock, self._first_s)
                )
                tasks.create_task(watchdog.watch(), name="watchdog")
                tasks.create_task(self._exit(child), name="exit")
        except* EngineLost:
            ours = not isinstance(self._settings.kind, AttachedEngine)
            self._stats.counts["restarts"] += ours
            then = "its node launches it again" if ours else "its node waits until it answers again"
            await self._registry.emit_event(self._stats, events.ENGINE_LOST, f"{self._status.detail}; {then}")

    async def drain_on_request(self, hurry: asyncio.Event) -> None:
        """Wait until an operator asks for a drain or the machine will be taken away (`engine.preempted`), and drain.
        The node then stays, and serves again after a restart."""
        known, asks = True, True  # a request from before this start is void
        while not await is_preempted(self._settings.preempted, self._session):
            try:
                if asks and await self._registry.take_drain_request(self._status.id) and not known:
                    log.info("an operator has asked this engine to drain")
                    return await self.drain(hurry)
                known = False
            except RedisUnavailable as error:
                log.debug("not looking for requests to drain: %s", error)
            except UserError as error:  # Redis users made before there were such requests
                log.warning("operators cannot drain this engine: %s", error)
                asks = False
            await asyncio.sleep(self._settings.heartbeat_s)
        log.warning("this machine will be taken away, says engine.preempted: draining")
        await self.drain(hurry)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Stop taking requests, let running ones finish for drain_s or until `hurry`, and abort the rest."""
        async with self._drains:
            if self._status.state is not NodeState.DRAINING:
                await self._drain(hurry)

    async def _drain(self, hurry: asyncio.Event) -> None:
        deadline = time.monotonic() + self._settings.drain_s
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._follower.swap_lock.acquire()  # and keep it: no further swaps
        except TimeoutError:
            log.warning("draining although a weight update has not ended")
        booted = self._status.state in (NodeState.READY, NodeState.LOADING, NodeState.QUARANTINED)
        self._status.transition_to(NodeState.DRAINING)
        try:
            if not booted or await self._wait_idle(deadline, since=time.monotonic() + NOTICE_S, hurry=hurry):
                return
            if isinstance(self._settings.kind, AttachedEngine):
                log.info("leaving the requests in flight to the attached engine, which keeps running")
                return
            log.info("aborting the requests in flight; they continue at other engines with their tokens so far")
            await self._client.abort(everything=True)
            await self._wait_idle(time.monotonic() + HAND_BACK_S, since=0.0)
        except EngineError as error:
            log.info("draining ended early: %s", error)

    async def _wait_idle(self, deadline: float, *, since: float, hurry: asyncio.Event | None = None) -> bool:
        """Wait until no request runs or waits, after `since`. Return False at `deadline` or `hurry`."""
        while time.monotonic() < deadline and not (hurry and hurry.is_set()):
            loads = await self._client.loads()
            if time.monotonic() > since and loads["running"] + loads["waiting"] == 0:
                return True
            await asyncio.sleep(0.1)
        return False

    @asynccontextmanager
    async def _incarnation(self) -> AsyncIterator[EngineProcess | None]:
        """Run a healthy engine inside the block; yields None for an attached one. Raises EngineLost."""
        status, kind = self._status, self._settings.kind
        # a partly loaded version must be loaded again, whatever its label
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
            grace_s = 0.0  # it ignores SIGTERM
            raise
        finally:
            await child.stop(grace_s=grace_s)

    async def _launch(
        self, kind: CpuEngine | SglangEngine, wanted: WeightUpdate | None, keys: EngineKeys
    ) -> tuple[EngineProcess, Path]:
        """Start the engine. Return it and the model directory that it serves."""
        status = self._status
        if wanted is not None:
            # Reported before it is read: the learner removes old versions, but none that an engine reports.
            status.transition_to(NodeState.SYNCING, "reading", version=wanted.version)
        model, label = await self._weights(wanted)
        self._follower.unlabelled = label == NO_VERSION.label
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
                seed=seed_of(self._run.seed, status.id, status.incarnation),
                update_s=self._settings.update_timeout_s,
            )

        hosts = parse_redis_url(self._run.redis_url).hosts
        interface = interface_variables(hosts[0][0]) if hosts else {}
        variables = {**interface, **environment(kind, keys)}
        try:
            return await EngineProcess.start(argv, variables, self._log_path), model
        except OSError as error:
            raise report_lost(status, NodeState.SUSPECT, f"the engine cannot be started: {error}") from error

    async def _read_target(self) -> WeightUpdate | None:
        """Return the target, unless its epoch is refused."""
        backoff = Backoff("reading the target", self._stats.waits)
        update: WeightUpdate | None = await retry_until_available(backoff, self._registry.target)
        return update if update is not None and self._follower.should_load(update) else None

    async def _weights(self, wanted: WeightUpdate | None) -> tuple[Path, str]:
        """Return (directory, label) to launch with: the target if it is valid, otherwise the run's initial model.

        A target that the engine could not be launched with, and an adapter, are loaded after the launch.
        """
        label = NO_VERSION.label
        if wanted is not None and wanted.is_initial:
            label = wanted.version.label if await self._follower.has_initial(wanted) else label
        elif wanted is not None and wanted.transport != "adapter":
            try:
                if (found := (await asyncio.to_thread(verify, wanted)).resolve()) != self._unlaunchable:
                    return found, wanted.version.label
                log.warning("launching with the initial model: the engine did not start with %s", wanted.version.label)
            except WeightsCorrupt as error:
                log.error("launching with the initial model: %s", error)
        model = self._run.model.resolve()
        if not (model / "config.json").is_file():
            raise UserError(
                f"there is no model at {self._run.model}",
                why=f"{model / 'config.json'} does not exist",
                todo="set run.model to a model directory in Hugging Face layout",
            )
        return model, label

    async def _wait_for_attached(self, kind: AttachedEngine, *, paused: bool) -> None:
        """Wait until the attached engine answers; its state is GONE meanwhile. Raises UserError if it is the wrong one.

        paused  it was left paused during a swap, and reports unhealthy only because of that. An engine that a killed
                node left paused is detected because it is paused for longer than a start takes.
        """
        if not self._validated:
            await validate_engine(self._client, self._url, self._run.model, wait_s=kind.wait_s)
        self._validated = True
        paused_since, now = 0.0, LoopClock.current().time
        while True:
            try:
                if paused:
                    await self._client.model_info()
                else:
                    await self._client.health(timeout_s=self._status.limit_s(self._settings.probe_timeout_s))
                return
            except EngineError as error:
                self._status.transition_to(NodeState.GONE, f"waiting for it to answer: {error}")
            if paused or not await self._client.paused():
                paused_since = 0.0
            elif not paused_since:
                paused_since = now()
            elif now() - paused_since >= kind.wait_s:
                # The node that paused it is gone, perhaps while loading: its label does not prove which weights it has.
                log.warning("%s stays paused: loading the complete target", self._url)
                self._tainted = paused = True
                self._stats.counts["found_paused"] += 1
            await asyncio.sleep(min(1.0, self._settings.probe_s))

    async def _wait_healthy(self, child: EngineProcess, model: Path) -> None:
        """Wait until the engine launched with `model` is healthy, and has compiled what the run's sampling needs.

        Raises EngineLost when it exits, and start_timeout_s after the memory of its processes has last grown.
        """
        now, run, began = LoopClock.current().time, self._run, time.monotonic()
        growth, wait_s = Growth(self._settings.start_timeout_s, now), self._settings.probe_timeout_s
        sampling = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
        while True:
            has_ended = growth.has_ended(lambda: memory_mib(child.pid))
            try:
                asked = now()
                await self._client.health(timeout_s=wait_s)
                if isinstance(self._settings.kind, SglangEngine):
                    # before READY: the watchdog would take a compilation of more than hang_s for a hang
                    await self._client.warm_up(sampling, timeout_s=max(1.0, growth.until - now()))
                self._first_s = now() - asked
                self._booted, self._unlaunchable = True, None
                self._status.start_s = time.monotonic() - began
                return
            except EngineError as error:
                wait_s *= 2 if error.cause == "timeout" else 1  # its first token may take longer
                if child.exited.done():
                    raise self._start_failure(child, model) from None
                if has_ended:
                    raise report_lost(self._status, NodeState.SUSPECT, f"not healthy in time: {error}") from None
            await asyncio.sleep(0.1)

    def _start_failure(self, child: EngineProcess, model: Path) -> Exception:
        what = f"the engine {describe_exit(child.returncode or 0)} during startup"
        if not model.is_dir():
            # The learner has removed that version during the launch: try the newest one next.
            return report_lost(self._status, NodeState.SUSPECT, f"{what}: its weights were removed")
        if model != self._run.model.resolve():  # the version may be the reason: try without it
            self._unlaunchable = model
            return report_lost(self._status, NodeState.SUSPECT, f"{what} with {model}")
        if self._booted:
            return report_lost(self._status, NodeState.SUSPECT, what)
        return UserError(
            what,
            why=f"the end of {child.log_path}:\n{tail(child.log_path)}",
            todo="fix that and start again",
        )

    async def _read_version(self) -> None:
        """Set READY at the version that the engine reports, or SYNCING if it is not of the current epoch.

        The label of an attached engine may be another run's: the engine loads the weights again.
        """
        try:
            facts = await read_capabilities(self._client, pause_mode=self._settings.pause_mode)
            installed = await asyncio.to_thread(installed_versions, self._settings.kind)
            self._status.update_capabilities(facts | {"versions": installed | facts.get("versions", {})})
            held = await self._client.version() or NO_VERSION
        except EngineError as error:
            raise report_lost(self._status, NodeState.SUSPECT, str(error)) from None
        if isinstance(self._settings.kind, AttachedEngine) and held != NO_VERSION:
            why = f"it was found with {held.label}, perhaps of another run: waiting for the complete target"
            self._status.transition_to(NodeState.SYNCING, why)
            return
        current = held.epoch == self._follower.highest_epoch
        self._status.transition_to(NodeState.READY if current else NodeState.SYNCING, version=held)

    async def _exit(self, child: EngineProcess | None) -> None:
        """Raise EngineLost when the engine exits. An attached engine is checked by the watchdog only."""
        if child is not None:
            status = await child.wait()
            raise report_lost(self._status, NodeState.SUSPECT, f"the engine {describe_exit(status)}")
