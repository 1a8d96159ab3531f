"""One weight update by broadcast, from begin to end: which groups there are, whether a session is open, what it holds.

    init group -> begin -> { bucket -> staging }* -> end: whole and faultless? -> engine changes over -> destroy group
                           (generation goes on)           (paused, or when nothing runs)

All methods run on the event loop; buckets are taken in the order in which they are announced.
"""

from __future__ import annotations

import asyncio

import torch

from rollout_server.cpu_engine.model.config import ModelConfig
from rollout_server.cpu_engine.model.loader import Weights, WeightsError
from rollout_server.cpu_engine.scheduler.engine import Engine, Refused, Update
from rollout_server.cpu_engine.weight_sync.group import Bucket, GroupLost, RendezvousSpec, UpdateGroup

IN_PLACE = (
    "the cache cannot be flushed while requests are paused in place: "
    "the weights were left as they are; send flush_cache=false or pause with retract"
)


class StagedWeights:
    """New weights that arrive while the old ones still generate: a second set of tensors, verified as it fills.

    Only a whole and faultless set is handed out, and then the engine changes over by taking another reference: nothing
    is copied while generation is paused, and a set that never becomes whole leaves no trace. Filled by the thread of a
    group, read by any. The first fault stays: it is what `finished` raises.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._weights = Weights(config, dtype)
        self._missing = set(self._weights.places)
        self._fault = ""
        self.empty = True

    @property
    def fault(self) -> str:
        """Why this set can never be used; empty: no reason so far."""
        return self._fault

    def fail(self, reason: str) -> None:
        """This set must not be used."""
        self._fault = self._fault or reason

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor in any float dtype, under its Hugging Face name. Never raises: a fault is remembered.

        So the rest of a bucket is received in spite of it, and no other engine of the group waits in vain.
        """
        self.empty = False
        try:
            self._weights.put(name, tensor)
            if name in self._weights.places:
                # read back from where it lies now, so that it need not be while generation is paused
                self._weights.checksum(name)
        except WeightsError as error:
            self.fail(str(error))
        self._missing.discard(name)

    def finished(self) -> Weights:
        """The whole set. Raises WeightsError."""
        if self._fault:
            raise WeightsError(self._fault)
        if self._missing:
            raise WeightsError(f"{len(self._missing)} tensor(s) were not sent, first {min(self._missing)!r}")
        return self._weights


class UpdateSession:
    """What was sent since begin. The last label that came with a bucket is the one that the weights will have."""

    def __init__(self, staging: StagedWeights) -> None:
        self.staging = staging
        self.version: str | None = None
        self.flush_cache = False
        self.ending = False
        self.arriving: set[asyncio.Task[None]] = set()


class UpdateSessions:
    """At most one session is open. `timeout_s` bounds how long a trainer is waited for, in joining and in receiving."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._groups: dict[str, UpdateGroup] = {}
        self._session: UpdateSession | None = None
        self._largest = 8 * sum(place.view.numel() for place in engine.weights.places.values()) + (1 << 20)

    async def join(self, rendezvous: RendezvousSpec) -> None:
        """Become a member. Raises Refused when the trainer does not come within the timeout."""
        if rendezvous.name in self._groups:
            raise Refused(f"Failed to initialize custom process group: a group {rendezvous.name!r} is there already.")
        group = self._groups[rendezvous.name] = UpdateGroup(rendezvous, self._timeout_s)
        try:
            # torch takes up to thrice the time that it was given
            await asyncio.wait_for(asyncio.wrap_future(group.joined), self._timeout_s)
        except (GroupLost, TimeoutError) as error:
            del self._groups[rendezvous.name]
            group.leave()  # should it come about after all
            why = str(error) or f"the trainer did not come within {self._timeout_s:g} s"
            raise Refused(f"Failed to initialize custom process group: {why}") from None

    async def leave(self, name: str) -> None:
        """Destroy a group, also in the middle of a bucket, which fails by that. Raises Refused for an unknown one."""
        group = self._groups.get(name)
        if group is None or not group.joined.done():
            raise Refused("The group to be destroyed does not exist.")
        del self._groups[name]
        await asyncio.wrap_future(group.leave())

    async def close(self) -> bool:
        """Leave all groups; whether each one's thread ended. One that waits in gloo for a trainer does not."""
        groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.leave()
        for group in groups:
            await asyncio.to_thread(group.thread.join, 0.5)
        return not any(group.thread.is_alive() for group in groups)

    def begin(self) -> None:
        """Open a session. Raises Refused while one is open."""
        if self._session is not None:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        weights = self._engine.weights
        self._session = UpdateSession(StagedWeights(weights.config, weights.dtype))

    def receive(
        self, group_name: str, bucket: Bucket, *, version: str | None, flush_cache: bool, abort_all: bool
    ) -> asyncio.Task[None]:
        """Start to take one bucket in. Raises Refused before the group is touched; the task does after the bucket came.

        What is wrong with the tensors is said only then: a member that stays away would hold up all the others.
        """
        session = self._session
        if session is None or session.ending:
            raise Refused(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        group = self._groups.get(group_name)
        if group is None or not group.joined.done():
            raise Refused(
                f"Failed to receive weights: Group {group_name} not in {sorted(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        size = sum(part.num_bytes for part in bucket.parts)
        if size > self._largest:
            raise Refused(f"Failed to receive weights: {size} bytes are more than this model has")
        if abort_all:
            self._engine.abort(lambda _: True)
        arrival = asyncio.wrap_future(group.receive(bucket, session.staging.put))
        task = asyncio.create_task(self._arrive(session, arrival, version, flush_cache))
        session.arriving.add(task)
        task.add_done_callback(session.arriving.discard)
        return task

    async def _arrive(
        self, session: UpdateSession, arrival: asyncio.Future[None], version: str | None, flush_cache: bool
    ) -> None:
        try:
            await arrival
        except GroupLost as error:
            session.staging.fail(f"a bucket was not received: {error}")
            raise Refused(f"Failed to receive weights: {error}") from None
        session.version = session.version if version is None else version
        session.flush_cache |= flush_cache
        if flush_cache and self._engine.paused == "in_place" and self._engine.scheduler.running:
            session.staging.fail(IN_PLACE)
        if session.staging.fault:
            raise Refused(f"Failed to update parameter online: {session.staging.fault}.")

    async def end(self) -> None:
        """Close the session and change over, paused or when nothing runs. Raises Refused or WeightsError: unchanged.

        A session in which nothing was sent changes nothing, as in SGLang.
        """
        session = self._session
        if session is None or session.ending:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        session.ending = True
        try:
            if session.arriving:
                await asyncio.wait(session.arriving)
            if session.staging.empty and not session.staging.fault:
                return
            update = Update(session.staging.finished(), session.version, session.flush_cache, abort_all=False)
            await asyncio.wrap_future(self._engine.update(update))
        finally:
            self._session = None
