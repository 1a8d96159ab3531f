"""Receive weights by broadcast in a weight-update group: prepare -> transfer -> commit.

    learner                         this node                        engine
    view "prepare"  ------------->  join, unless it is in the group  /init_weights_update_group
                                    receive the proof, if the view has one: pause, begin, bucket, end, continue
                    <-------------  answer "prepared"
    view "transfer" ------------->  pause*, begin, every bucket, end, checksum
                    <-------------  answer "loaded", flush
    view "commit"   ------------->  label, read back, continue

* An engine that stages (the CPU engine) generates until all buckets have arrived, and pauses only for the rest.

If a view ends without a commit, the engine either still holds its version and continues; or it was modified, may hold
a mix of versions, and stays paused until a complete version has been loaded.

An engine that waits for a broadcast (`EngineInfo.needs_broadcast`) takes part whatever its state and version. The view
may then be of the version that is announced already: only the view's phase commits it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from typing import Literal

from protocol.errors import ForayError
from protocol.messages import NEEDS_BROADCAST, NodeState, ViewAnswer, WeightView
from protocol.runtime.http.auth import member_token, read_access
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.weights import WeightBucket, refusal, sum_of
from rollout_server.engine.admin import EngineAdmin, WeightChecksums
from rollout_server.engine.base import EngineError
from rollout_server.metrics import Stats
from rollout_server.node.config import NodeSettings
from rollout_server.node.registry import Registry, TargetView
from rollout_server.node.status import NO_VERSION, EngineStatus

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Longest time between two looks for the next phase, which wakes the node; also the wait after an error of Redis."""
ALREADY_OPEN = "session is already open"
"""Part of the answer of SGLang and the CPU engine to a second begin."""
JOINING = "joining"
"""Detail of an answer sent before the group is formed."""
LISTENS_S = 2.0
"""Timeout for an engine to answer before it joins a group."""
CLEAN_UP_S = 10.0
"""Timeout of a cleanup call after a failure."""
MARGIN_S = 1.0
WAITING = (NodeState.READY, NodeState.SYNCING, NodeState.QUARANTINED)
"""States in which an engine that waits for a broadcast can take part."""
NONE = WeightChecksums("")
PauseMode = Literal["retract", "in_place"]


class TransferAborted(ForayError):
    """The view ends without a commit."""


@dataclass
class TransferState:
    """Progress of this engine in one view. Times are from time.monotonic; 0.0: not yet.

    buckets  of the view
    again    the view's version is the target already
    before   state of the engine when the view began
    waits    it waited for a broadcast
    open     the engine has an open session
    touched  the engine may hold a mix of two versions
    """

    view: WeightView
    member: str
    deadline: float
    again: bool
    before: NodeState
    waits: bool
    buckets: tuple[WeightBucket, ...] = ()
    paused_at: float = 0.0
    transfer_s: float = 0.0
    verify_s: float = 0.0
    open: bool = False
    touched: bool = False

    @property
    def left_s(self) -> float:
        """Seconds to the deadline. Raises TransferAborted if it has passed."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TransferAborted(f"the deadline of phase {self.view.phase!r} has passed")
        return left

    def pause_s(self) -> float:
        """Seconds since generation was paused."""
        return time.monotonic() - self.paused_at if self.paused_at else 0.0


class WeightReceiver:
    """Takes part in views for one engine, across its incarnations."""

    def __init__(self, status: EngineStatus, registry: Registry, settings: NodeSettings, stats: Stats) -> None:
        self._status, self._registry, self._settings, self._stats = status, registry, settings, stats
        self._access = read_access(os.environ)
        self._group = ""
        """Group that the engine is in, as far as known."""
        self._home = ""
        """Incarnation that joined the group."""
        self._last = (0, 0)
        """Epoch and number of the last answered view."""

    @property
    def in_group(self) -> bool:
        """Whether the engine is in a group."""
        return bool(self._group) and self._home == self._status.incarnation

    def is_invited(self, target_view: TargetView, *, epoch: int) -> bool:
        """Return whether a view in preparation includes this engine, and it can still join. epoch: the highest known"""
        view, status = target_view.view, self._status
        if (
            view is None
            or view.phase != "prepare"
            or self._member not in view.members
            or (view.epoch, view.number) <= self._last
            or target_view.left_s <= 0
        ):
            return False
        if status.state is NodeState.READY and view.version <= status.version:
            return False
        if status.needs_broadcast:
            return status.state in WAITING and view.epoch == epoch
        return status.state is NodeState.READY and status.version.epoch == epoch

    @property
    def _member(self) -> str:
        return f"{self._status.id}/{self._status.incarnation}"

    async def receive(self, client: EngineAdmin, target_view: TargetView) -> None:
        """Take part in one view to its end. A failure is not raised, but reported in the status.

        Waits for the learner's next phase; unblocked by it, by the deadline, or by a newer epoch.
        """
        view = target_view.view
        assert view is not None
        self._last = (view.epoch, view.number)
        target, status = target_view.target, self._status
        part = TransferState(
            view,
            self._member,
            time.monotonic() + target_view.left_s,
            again=target is not None and target.version == view.version,
            before=status.state,
            waits=status.needs_broadcast,
        )
        try:
            await self._prepare(client, part)
            await self._phase(part, "transfer")
            await self._load(client, part)
            await self._answer(part, "loaded", sums=await self._verify(client, part))
            if self._settings.pause_mode == "retract":
                await client.flush_cache()  # takes 0.3 s in SGLang, while the learner waits for the other engines
            await self._phase(part, "commit")
            await self._commit(client, part)
        except (TransferAborted, EngineError) as error:
            self._stats.counts["views_failed"] += 1
            log.warning("view %d of %s: %s", view.number, view.version.label, error)
            await self._abort(client, part, str(error))

    async def _prepare(self, client: EngineAdmin, part: TransferState) -> None:
        view = part.view
        try:
            if await self._registry.held_back(self._settings.role, view.version):
                raise TransferAborted("an evaluation is running")
            part.buckets = await self._registry.buckets(view)
        except RedisUnavailable as error:
            raise TransferAborted(f"Redis: {error}") from None
        if why := refusal(view.checksum):
            raise TransferAborted(why)
        if view.plan and not part.buckets:
            raise TransferAborted("Redis does not hold the view's plan (wv:plan): another learner has written its own")
        # an engine that hangs would block the whole group
        await client.model_info(timeout_s=self._status.limit_s(LISTENS_S))
        if not (self.in_group and self._group == view.group):
            await self._leave(client)
            offset = view.rank_offsets[view.members.index(part.member)]
            self._group, self._home = view.group, self._status.incarnation
            # joining returns only when all members have joined: the learner must see which one is missing
            await self._answer(part, "prepared", detail=JOINING)
            await client.join_group(view, offset, timeout_s=part.left_s + MARGIN_S)
            if view.proof is not None:
                await self._prove(client, part, view.proof)
        await self._answer(part, "prepared")

    async def _prove(self, client: EngineAdmin, part: TransferState, proof: WeightBucket) -> None:
        """Receive a tensor that the engine holds already, and continue: the group is connected up to this engine.

        NCCL joins at once and connects in the first broadcast. SGLang takes a bucket only inside a session, and outside
        a pause only when no request runs. Requests stay in place meanwhile: no weight changes. An engine without a
        version has no requests, and holds a mix afterwards.
        """
        serves = part.before is NodeState.READY
        if not self._stages:
            await self._pause(client, part, "in_place" if serves else self._settings.pause_mode)
            part.touched = not serves
        await self._begin(client, part)
        try:
            await client.receive_bucket(
                proof, part.view.group, flattened=part.view.flattened, timeout_s=part.left_s + MARGIN_S
            )
        finally:
            await self._end_proof(client, part)
        if part.paused_at and serves:
            await client.resume()
            part.paused_at = 0.0
            self._status.transition_to(NodeState.READY)

    async def _end_proof(self, client: EngineAdmin, part: TransferState) -> None:
        try:
            await client.end_update(timeout_s=self._status.limit_s(CLEAN_UP_S))
        except EngineError as error:
            if not (self._stages and error.cause == "refused"):  # one that stages refuses an incomplete set
                part.touched = True  # unknown: the session may have left the weights unpacked
                raise

    async def _phase(self, part: TransferState, wanted: str) -> None:
        """Wait until the view is in phase `wanted`, and adopt its deadline. Raises TransferAborted if it ended."""
        view = part.view
        while True:
            try:
                await self._registry.woken(min(LOOK_S, max(0.0, part.deadline - time.monotonic())))
                target_view = await self._registry.target_view()
            except RedisUnavailable as error:
                part.left_s  # noqa: B018 - raises at the deadline
                log.warning("view %d waits for Redis: %s", view.number, error)
                await asyncio.sleep(LOOK_S)
                continue
            target, now = target_view.target, target_view.view
            if target is not None and target.epoch > view.epoch:
                raise TransferAborted(f"epoch {target.epoch} has started")
            if wanted == "commit" and now is not None and now.epoch == view.epoch and view.number in now.committed:
                return  # this node missed it, asleep or without Redis; another view has begun
            if part.again:
                if target is None or target.version != view.version:
                    raise TransferAborted("another version was announced")
            elif target is not None and target.version == view.version:
                if wanted == "commit" and target.transport == "distributed":
                    return  # the commit itself; its phase is written after the target
                raise TransferAborted("the version was published as files")
            if now is not None and (now.epoch, now.number) == (view.epoch, view.number):
                if now.phase == wanted:
                    part.view, part.deadline = now, time.monotonic() + target_view.left_s
                    return
                if now.phase == "abort":
                    raise TransferAborted("the learner aborted it")
            elif now is not None and (now.epoch, now.number) > (view.epoch, view.number):
                raise TransferAborted("the learner started another view")
            part.left_s  # noqa: B018 - raises at the deadline

    async def _load(self, client: EngineAdmin, part: TransferState) -> None:
        """Receive every bucket. The engine is paused afterwards."""
        view, stages = part.view, self._stages
        if not stages and not part.paused_at:
            await self._pause(client, part, self._settings.pause_mode)
        began = time.monotonic()
        await self._begin(client, part)
        part.open, part.touched = True, not stages
        for bucket in part.buckets:
            # a margin, so that a failed broadcast is reported by the engine and not by our timeout
            await client.receive_bucket(bucket, view.group, flattened=view.flattened, timeout_s=part.left_s + MARGIN_S)
        part.transfer_s = time.monotonic() - began
        if stages:
            await self._pause(client, part, self._settings.pause_mode)
        try:
            await client.end_update(timeout_s=part.left_s)
        except EngineError as error:
            # an engine that stages rejects without a change; after any other failure its weights are unknown
            part.open, part.touched = False, part.touched or error.cause != "refused"
            raise
        part.open, part.touched = False, True

    async def _begin(self, client: EngineAdmin, part: TransferState) -> None:
        try:
            await client.begin_update(timeout_s=part.left_s, algorithm=self._algorithm(part))
        except EngineError as error:
            part.open = ALREADY_OPEN in error.detail  # left by a killed node: it is closed with this view
            raise

    async def _pause(self, client: EngineAdmin, part: TransferState, mode: PauseMode) -> None:
        self._status.transition_to(NodeState.LOADING, part.view.version.label)
        part.paused_at = time.monotonic()
        await client.pause(mode)

    async def _verify(self, client: EngineAdmin, part: TransferState) -> WeightChecksums:
        began = time.monotonic()
        sums = await client.checksums(timeout_s=part.left_s, algorithm=self._algorithm(part))
        part.verify_s = time.monotonic() - began
        return sums

    async def _commit(self, client: EngineAdmin, part: TransferState) -> None:
        status, version = self._status, part.view.version
        await client.label(version.label)
        held = await client.version()
        if held != version:
            raise EngineError(
                "bad_output", client.name, f"it reports version {held and held.label}, not {version.label}"
            )
        await client.resume()
        status.pause_s, status.load_s = part.pause_s(), part.transfer_s
        status.update_capabilities({"adapter": ""})
        status.updates += 1
        self._stats.counts["updates"] += 1
        self._stats.counts["updates_distributed"] += 1
        status.transition_to(NodeState.READY, version=version)
        log.info(
            "received %s: paused %.3f s; transfer %.3f s, checksum %.3f s",
            version.label, status.pause_s, part.transfer_s, part.verify_s,
        )  # fmt: skip

    async def _answer(
        self,
        part: TransferState,
        phase: Literal["prepared", "loaded", "failed"],
        *,
        sums: WeightChecksums = NONE,
        detail: str = "",
    ) -> None:
        """Send an answer to the learner. Raises TransferAborted if Redis does not accept it."""
        sent = [name for bucket in part.buckets for name in bucket.names] if sums.tensors else []
        answer = ViewAnswer(
            member=part.member,
            number=part.view.number,
            phase=phase,
            kind=self._status.info().layout or self._status.info().kind,
            checksum=sums.whole,
            tensors_sha256=sum_of({n: sums.tensors[n] for n in sent if n in sums.tensors}) if sent else "",
            unused=tuple(name for name in sent if name not in sums.tensors),
            pause_s=part.pause_s(),
            transfer_s=part.transfer_s,
            verify_s=part.verify_s,
            touched=part.touched,
            detail=detail[:2000],
            token=member_token(self._access, part.member, part.view.group),
        )
        try:
            await self._registry.answer(part.view, answer)
        except RedisUnavailable as error:
            raise TransferAborted(f"Redis: {error}") from None

    # --- failures ---

    async def _abort(self, client: EngineAdmin, part: TransferState, reason: str) -> None:
        """Report to the learner, close the session, and let the engine continue at its version or quarantine it."""
        if part.open:
            if self._stages:
                await self._leave(client)  # ends the bucket in progress: the end of the session would wait for it
            await self._close_session(client, part)
        status, label = self._status, part.view.version.label
        said = f"{label} was {'received in part' if part.touched else 'not received'}: {reason}"
        said = f"{NEEDS_BROADCAST} {said}" if part.waits else said
        if part.touched:
            status.transition_to(NodeState.QUARANTINED, said, version=NO_VERSION)
        try:
            await self._answer(part, "failed", detail=reason)
        except TransferAborted as error:
            log.warning("could not send the answer to the learner: %s", error)  # its deadline ends the transfer
        await self._leave(client)
        if part.touched or not (part.paused_at or part.waits):
            return
        if part.paused_at and part.before is not NodeState.QUARANTINED:
            try:
                await client.resume()
            except EngineError as error:
                log.warning("cannot continue after a failed transfer: %s", error)  # the watchdog checks it
        status.transition_to(part.before, said)

    async def _close_session(self, client: EngineAdmin, part: TransferState) -> None:
        """Close the session, which would block the next one. In an engine that stages, this applies a complete set."""
        try:
            if not part.paused_at:
                await self._pause(client, part, self._settings.pause_mode)
            await client.end_update(timeout_s=self._status.limit_s(CLEAN_UP_S))
            part.touched = True
        except EngineError as error:
            part.touched = part.touched or error.cause != "refused"
            log.info("closing the session: %s", error)
        part.open = False

    async def _leave(self, client: EngineAdmin) -> None:
        """Leave the known group. It may be broken, or gone with the incarnation that joined it."""
        group, self._group = self._group, ""
        if not group:
            return
        try:
            await client.leave_group(group, timeout_s=self._status.limit_s(CLEAN_UP_S))
        except EngineError as error:
            log.info("leaving group %s: %s", group, error)

    def _algorithm(self, part: TransferState) -> str:
        """Return the algorithm to name to the engine, if it is one that knows several."""
        return part.view.checksum if self._stages else ""

    @property
    def _stages(self) -> bool:
        return self._status.info().kind == "cpu"
