"""Follow the target: verify every new policy version, load it, and read its label back.

A version comes as a directory, or by broadcast in a group that the engine is invited to (`receiver.py`). A version that
was broadcast to others has no directory at first: the learner writes one when it sees an engine that needs it. A host
that does not have the directory waits for a broadcast, if the learner sends any.

Verification reads every byte of the new version while the engine generates; only the swap pauses it. A failure before
the swap changes nothing: the engine stays READY at its old version, and the node tries again. A failure during the swap
may leave a mix of two versions: that incarnation of the engine is lost. Only the CPU engine verifies a version
itself before it changes anything; one that refuses a version continues at its old one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from protocol.errors import ForayError
from protocol.messages import INITIAL, NEEDS_BROADCAST, NEEDS_FILES, NodeState, WeightUpdate
from protocol.runtime.files import model_digest
from protocol.runtime.redis.aio import Backoff
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.timing import backoff_s
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError
from rollout_server.metrics import Stats
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.registry import Registry
from rollout_server.node.status import NO_VERSION, EngineStatus
from rollout_server.node.weights.lora import AdapterLoader
from rollout_server.node.weights.manifest import WeightsAbsent, WeightsCorrupt, is_present, verify
from rollout_server.node.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

RETRY_S, LONGEST_RETRY_S = 0.5, 10.0


class EngineLost(ForayError):
    """This incarnation of the engine is lost."""


def report_lost(status: EngineStatus, state: NodeState, detail: str) -> EngineLost:
    """Set the status in Redis, and return the error to raise. First, because stopping the engine may take seconds."""
    status.transition_to(state, detail)
    return EngineLost(detail)


class WeightFollower:
    """Keeps one incarnation of an engine at the target version.

    model          the run's initial model on this host
    highest_epoch  survives incarnations: a target with a lower epoch comes from a learner that was replaced
    swap_lock      held during a swap, so that a drain waits for its end
    unlabelled     this node has launched the engine with `model` and the label NO_VERSION
    """

    def __init__(
        self, status: EngineStatus, registry: Registry, settings: NodeSettings, stats: Stats, model: Path
    ) -> None:
        self._status, self._registry, self._settings, self._stats = status, registry, settings, stats
        self._model = model
        self.unlabelled = False
        self.highest_epoch = 0
        self.swap_lock = asyncio.Lock()
        self._refused = ""
        self._absent = 0
        """Announced versions, one after the other, whose files this host did not have."""
        self._receiver = WeightReceiver(status, registry, settings, stats)

    async def follow(self, client: EngineAdmin) -> None:
        """Consume target and view in Redis; produce loaded versions; wait for a change, longer after a failure.

        Also waits for evaluations to end. Raises EngineLost when a swap failed; otherwise ended by cancellation.
        """
        loader = AdapterLoader(client, self._status, self._settings, self._stats)
        try:
            await self._follow(client, loader)
        finally:
            loader.close()

    async def _follow(self, client: EngineAdmin, loader: AdapterLoader) -> None:
        backoff = Backoff("reading the target", self._stats.waits, longest_s=2.0)
        failures = 0
        tried: WeightUpdate | None = None
        while True:
            try:
                target_view = await self._registry.target_view()
                backoff.reset()
                if self._status.needs_recheck and not await self._recheck_version(client, target_view.target):
                    await asyncio.sleep(self._settings.poll_s)
                    continue
                if self._receiver.is_invited(target_view, epoch=self.highest_epoch):
                    async with self.swap_lock:
                        await self._receiver.receive(client, target_view)
                    continue
                update = target_view.wanted(self._settings.role, self._status.version)
                if update is None or not self.should_load(update) or await self._is_elsewhere(update):
                    await self._registry.woken(self._settings.poll_s)
                    continue
                failures, tried = (failures if update == tried else 0), update
                failures = 0 if await self._advance(client, loader, update, failures) else failures + 1
            except RedisUnavailable as error:
                await backoff.sleep(error)
                continue
            if failures:
                await asyncio.sleep(backoff_s(failures, RETRY_S, LONGEST_RETRY_S))

    async def _recheck_version(self, client: EngineAdmin, target: WeightUpdate | None) -> bool:
        """Check an engine that was not watched for a while. Return False if it does not answer (yet).

        READY if it generates, and still holds the known version, of the current epoch. Otherwise it stays SYNCING and
        is loaded.
        """
        status = self._status
        if target is not None:
            self.highest_epoch = max(self.highest_epoch, target.epoch)
        try:
            await client.health(timeout_s=status.limit_s(self._settings.probe_timeout_s))
            held = await client.version() or NO_VERSION
        except EngineError as error:
            status.transition_to(status.state, f"its health is not known yet: {error}")
            return False
        status.needs_recheck = False
        self._stats.counts["rechecks"] += 1
        if status.info().adapter:
            log.info("loading adapter %s again, since the engine may have lost it", status.version.label)
        elif held == status.version and held.epoch == self.highest_epoch:
            status.transition_to(NodeState.READY)
        else:
            status.transition_to(NodeState.SYNCING, "it no longer holds the target version", version=NO_VERSION)
        return True

    def should_load(self, update: WeightUpdate) -> bool:
        """Return whether `update` is newer than the engine's version and has files. Refuses older epochs."""
        if update.epoch < self.highest_epoch:
            if self._refused != update.version.label:
                self._refused = update.version.label
                log.warning("ignoring %s: the current epoch is %d", update.version.label, self.highest_epoch)
            return False
        self.highest_epoch = update.epoch
        if not update.path:
            return False
        behind = update.version > self._status.version
        # the same version, but without requests: a corrupt copy was replaced, or it was never read back
        return behind or (update.version == self._status.version and self._status.state is NodeState.SYNCING)

    async def _advance(self, client: EngineAdmin, loader: AdapterLoader, update: WeightUpdate, failures: int) -> bool:
        """Load `update`. Return True if it is loaded or no longer the target. Raises EngineLost, RedisUnavailable."""
        label = update.version.label
        # The learner removes old versions, but none that an engine holds or names at the end of its detail.
        self._status.transition_to(self._status.state, f"verifying {label}")
        try:
            if not update.is_initial:
                await asyncio.to_thread(verify, update)
            elif not await self.has_initial(update):
                self._status.transition_to(self._status.state, f"{NEEDS_FILES} {label}")
                return False
        except WeightsCorrupt as error:
            # counted over versions: a fast learner announces the next one before the same one is tried again
            self._absent = self._absent + 1 if isinstance(error, WeightsAbsent) else 0
            patient = failures + 1 < self._settings.verify_attempts
            if self._absent >= self._settings.verify_attempts and self._is_sent(update):
                self._status.transition_to(self._status.state, f"{NEEDS_BROADCAST} {error}")
                return False
            self._stats.counts["strikes"] += 1
            state = self._status.state if patient else NodeState.QUARANTINED
            self._status.transition_to(state, f"{label} cannot be verified: {error}")
            return False
        self._absent = 0
        if not await self._wait_for_evaluation(update):
            return True
        async with self.swap_lock:
            if self._status.state is NodeState.DRAINING:
                return True
            if update.is_initial:
                return await self._load_initial(client, update)
            return await (loader.load(update) if update.transport == "adapter" else self._swap(client, update))

    def _is_sent(self, update: WeightUpdate) -> bool:
        """Return whether the engine can get the version, or a later one, without its files."""
        return update.broadcast and not update.is_initial and "distributed" in self._status.info().transports

    async def _is_elsewhere(self, update: WeightUpdate) -> bool:
        """Return whether the engine waits for a broadcast, and this host still does not have the files."""
        waits = self._status.needs_broadcast and self._is_sent(update)
        return waits and not await asyncio.to_thread(is_present, update)

    async def has_initial(self, update: WeightUpdate) -> bool:
        """Return whether this host's initial model is the one in `update`, for an engine that can read it."""
        if isinstance(self._settings.kind, AttachedEngine):
            return False
        return update.digest == INITIAL + await asyncio.to_thread(model_digest, self._model)

    async def _load_initial(self, client: EngineAdmin, update: WeightUpdate) -> bool:
        """Label an engine that still holds the initial model as `update`; load it into any other one."""
        status, label = self._status, update.version.label
        sound = status.state is not NodeState.QUARANTINED and self.unlabelled and status.version == NO_VERSION
        try:
            if not sound or await client.version() != NO_VERSION:
                return await self._swap(client, update.model_copy(update={"path": str(self._model.resolve())}))
            await client.label(label)
            held = await client.version()
            if held != update.version:
                raise EngineError("bad_output", client.name, f"it reports version {held and held.label}, not {label}")
        except EngineError as error:
            self._stats.counts["strikes"] += 1
            status.transition_to(status.state, f"could not label {label}: {error}")
            return False
        status.transition_to(NodeState.READY, version=update.version)
        log.info("%s is the initial model, which the engine holds", label)
        return True

    async def _wait_for_evaluation(self, update: WeightUpdate) -> bool:
        """Wait while an evaluation runs. Return False if the target has changed meanwhile."""
        if not await self._registry.held_back(self._settings.role, update.version):
            return True
        log.info("loading %s waits for the end of an evaluation", update.version.label)
        with self._stats.waits.blocked_on("eval"):
            while await self._registry.held_back(self._settings.role, update.version):  # noqa: ASYNC110 - Redis has no event for it
                await asyncio.sleep(self._settings.poll_s)
        return await self._registry.target() == update

    async def _swap(self, client: EngineAdmin, update: WeightUpdate) -> bool:
        """Pause, load, read back, continue. Return False if nothing has changed. Raises EngineLost if it may have."""
        status, settings, label = self._status, self._settings, update.version.label
        before = status.state
        status.transition_to(NodeState.LOADING, label)
        paused_at = time.monotonic()
        try:
            await client.pause(settings.pause_mode)
        except EngineError as error:
            self._stats.counts["strikes"] += 1
            if before is NodeState.QUARANTINED and status.version == NO_VERSION:
                # it may hold a mix of two versions and must not continue
                raise report_lost(status, NodeState.QUARANTINED, f"cannot load {label}: {error}") from error
            await self._try_resume(client)
            status.transition_to(before, f"could not load {label}: {error}")
            return False
        try:
            loading_at = time.monotonic()
            await client.update_weights_from_disk(
                update.path,
                label=label,
                flush=settings.pause_mode == "retract",
                timeout_s=status.update_limit_s(settings.update_timeout_s),
            )
            status.load_s = time.monotonic() - loading_at
            held = await client.version()
            if held != update.version:
                raise EngineError("bad_output", client.name, f"it reports version {held and held.label}, not {label}")
            await client.resume()
        except EngineError as error:
            self._stats.counts["strikes"] += 1
            if before is not NodeState.QUARANTINED and await self._is_unchanged(client, update, error):
                await self._try_resume(client)
                status.transition_to(before, f"could not load {label}: {error}")
                return False
            raise report_lost(status, NodeState.QUARANTINED, f"{label} is loaded in part: {error}") from error
        status.pause_s = time.monotonic() - paused_at
        status.update_capabilities({"adapter": ""})
        status.updates += 1
        self._stats.counts["updates"] += 1
        status.transition_to(NodeState.READY, version=update.version)
        log.info("loaded %s: paused %.3f s, of which %.3f s loading", label, status.pause_s, status.load_s)
        return True

    async def _is_unchanged(self, client: EngineAdmin, update: WeightUpdate, error: EngineError) -> bool:
        """Return whether the engine refused `update` as a whole: a CPU engine that still has another label."""
        if error.cause != "refused" or self._status.info().kind != "cpu":
            return False
        try:
            return await client.version() != update.version
        except EngineError:
            return False  # unknown

    async def _try_resume(self, client: EngineAdmin) -> None:
        try:
            await client.resume()
        except EngineError as error:
            log.warning("cannot continue after a failed pause: %s", error)  # the watchdog checks whether it is alive
