"""Weight updates by broadcast, from begin to end: groups, the open session, and its staged weights.

    init group -> begin -> { bucket -> staging }* -> end: complete and valid? -> engine switches -> destroy group
                           (generation continues)         (paused, or when no request runs)

All methods run on the event loop. Buckets are received in the order in which they are announced.
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
    "the weights were not changed; send flush_cache=false or pause with retract"
)


class StagedWeights:
    """A second set of tensors for new weights, verified as it is filled, while the old weights are in use.

    Only a complete and valid set is returned. The engine then switches references: nothing is copied while generation
    is paused, and an incomplete set has no effect. Filled by the thread of a group, read by any. `finished` raises the
    first error.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, algorithm: str = "sha256") -> None:
        self._weights, self._algorithm = Weights(config, dtype), algorithm
        self._missing = set(self._weights.places)
        self._fault = ""
        self.empty = True

    @property
    def fault(self) -> str:
        """Why this set cannot be used; empty if there is no error so far."""
        return self._fault

    def fail(self, reason: str) -> None:
        """Mark this set as unusable."""
        self._fault = self._fault or reason

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor of any float dtype under its Hugging Face name. Never raises: an error is recorded.

        The rest of the bucket is still received, so that the other engines of the group are not blocked.
        """
        self.empty = False
        try:
            self._weights.put(name, tensor)
            if name in self._weights.places:
                # computed now, so that it is not necessary while generation is paused
                self._weights.checksum(name, self._algorithm)
        except WeightsError as error:
            self.fail(str(error))
        self._missing.discard(name)

    def finished(self) -> Weights:
        """Return the complete set. Raises WeightsError."""
        if self._fault:
            raise WeightsError(self._fault)
        if self._missing:
            raise WeightsError(f"{len(self._missing)} tensor(s) were not sent, first {min(self._missing)!r}")
        return self._weights


class UpdateSession:
    """The data received since begin. The weights get the last label that came with a bucket."""

    def __init__(self, staging: StagedWeights) -> None:
        self.staging = staging
        self.version: str | None = None
        self.flush_cache = False
        self.ending = False
        self.arriving: set[asyncio.Task[None]] = set()


class UpdateSessions:
    """The groups and the session, of which at most one is open. `timeout_s`: for joining and receiving."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._groups: dict[str, UpdateGroup] = {}
        self._session: UpdateSession | None = None
        self._largest = 8 * sum(place.view.numel() for place in engine.weights.places.values()) + (1 << 20)

    async def join(self, rendezvous: RendezvousSpec) -> None:
        """Join a group. Raises Refused if the trainer does not join within the timeout."""
        if rendezvous.name in self._groups:
            raise Refused(f"Failed to initialize custom process group: group {rendezvous.name!r} already exists.")
        group = self._groups[rendezvous.name] = UpdateGroup(rendezvous, self._timeout_s)
        try:
            # torch may take up to three times its timeout
            await asyncio.wait_for(asyncio.wrap_future(group.joined), self._timeout_s)
        except (GroupLost, TimeoutError) as error:
            del self._groups[rendezvous.name]
            group.leave()  # in case it is formed later
            why = str(error) or f"the trainer did not join within {self._timeout_s:g} s"
            raise Refused(f"Failed to initialize custom process group: {why}") from None

    async def leave(self, name: str) -> None:
        """Destroy a group. A bucket in progress fails. Raises Refused for an unknown group."""
        group = self._groups.get(name)
        if group is None or not group.joined.done():
            raise Refused("The group to be destroyed does not exist.")
        del self._groups[name]
        await asyncio.wrap_future(group.leave())

    async def close(self) -> bool:
        """Leave all groups. Return whether all threads have ended: one that waits in gloo for a trainer has not."""
        groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.leave()
        for group in groups:
            await asyncio.to_thread(group.thread.join, 0.5)
        return not any(group.thread.is_alive() for group in groups)

    def begin(self, algorithm: str = "sha256") -> None:
        """Open a session; `algorithm`: of the checksums, one of DIGESTS. Raises Refused if one is already open."""
        if self._session is not None:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        weights = self._engine.weights
        self._session = UpdateSession(StagedWeights(weights.config, weights.dtype, algorithm))

    def receive(
        self, group_name: str, bucket: Bucket, *, version: str | None, flush_cache: bool, abort_all: bool
    ) -> asyncio.Task[None]:
        """Start to receive a bucket. Raises Refused before the group is used; the task raises it after the broadcast.

        Invalid tensors are reported only then: a member that does not take part would block all the others.
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
            raise Refused(f"Failed to receive weights: {size} bytes exceed the size of this model")
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
        """Close the session and switch the weights, when paused or when no request runs.

        An empty session has no effect. If it raises Refused or WeightsError, the weights are unchanged.
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
