"""Which engines receive a version over the group, and the proof that a new group connects them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from learner.weights.base import EngineLink
from learner.weights.buckets import Named, PackedBucket, layout
from protocol.messages import EngineInfo, NodeState, WeightUpdate
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.timing import backoff_s
from protocol.runtime.torch_safety import torch_versions
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)

EXCLUDE_SLOW_MEMBER_S = 60.0
"""Seconds for which a slow member is excluded."""
LONGEST_RETRY_S = 60.0
"""Longest wait between two attempts to send one version again."""
MAX_SKIPPED_VERSIONS = 32
"""After consecutive failures 0, 1, 3, 7 ... versions use files before the group is retried, at most this many."""
SIMPLE = "norm.weight"
"""End of the names of tensors that every engine holds as they are sent: neither fused nor cut."""


class Membership:
    """Selects the members of each view.

    versions    torch and NCCL of this process; by default those installed
    patience_s  seconds that an engine which needs a broadcast waits for the next version
    """

    def __init__(
        self,
        link: EngineLink,
        backend: str,
        versions: Mapping[str, str] | None = None,
        *,
        patience_s: float = 0.0,
    ) -> None:
        self._link, self._backend, self._patience_s = link, backend, patience_s
        self._versions = torch_versions() if versions is None else versions
        self._failures, self._skip_versions = 0, 0
        self._excluded: dict[str, float] = {}
        self._retry_at = 0.0
        """Time before which no version is sent again."""
        self._waiting: dict[str, float] = {}
        """Member that needs a broadcast -> since when."""
        self._reported: set[str] = set()
        """Members whose versions do not fit, as logged."""

    def of_next(self, last: WeightUpdate) -> tuple[list[EngineInfo], str]:
        """Return the engines that receive the version after `last`, in the order of their ranks; or [] and why."""
        if self._skip_versions:
            self._skip_versions -= 1
            return [], "transfers have failed"
        try:
            pin, engines = self._link.pin(), [e for e in self._link.engines() if _can_receive(e, last)]
        except RedisUnavailable as error:
            return [], f"Redis: {error}"
        # the next version is beyond every version that an evaluation can have pinned
        free = [e for e in engines if pin is None or not pin.concerns(e.role)]
        return self._admitted(free), "an evaluation is running" if engines else "no engine is ready to receive"

    def of_again(self, last: WeightUpdate) -> list[EngineInfo]:
        """Return the engines that `last` is sent to again, in the order of their ranks: those that need a broadcast,
        once one of them has waited for `patience_s`, unless transfers have just failed. Raises RedisUnavailable.
        """
        now = time.monotonic()
        engines = [e for e in self._link.engines() if _needs_broadcast(e)]
        self._waiting = {m: self._waiting.get(m, now) for m in map(member_of, engines)}
        due = any(since + self._patience_s <= now for since in self._waiting.values())
        if not due or now < self._retry_at:
            return []
        pin = self._link.pin()
        return self._admitted(e for e in engines if pin is None or not pin.holds_back(e.role, last.version))

    def _admitted(self, engines: Iterable[EngineInfo]) -> list[EngineInfo]:
        now = time.monotonic()
        self._excluded = {member: until for member, until in self._excluded.items() if until > now}
        found = [e for e in engines if member_of(e) not in self._excluded and self._compatible(e)]
        return sorted(found, key=member_of)

    def failed(self, missing: Sequence[str]) -> None:
        """Note a failed transfer, and the members that delayed it."""
        self._failures += 1
        self._skip_versions = int(backoff_s(self._failures, 1.0, MAX_SKIPPED_VERSIONS + 1.0)) - 1
        self._retry_at = time.monotonic() + backoff_s(self._failures, 1.0, LONGEST_RETRY_S)
        self._excluded |= dict.fromkeys(missing, time.monotonic() + EXCLUDE_SLOW_MEMBER_S)

    def succeeded(self) -> None:
        """Note a verified transfer."""
        self._failures = self._skip_versions = 0

    def _compatible(self, engine: EngineInfo) -> bool:
        """Return whether the engine's torch and NCCL can meet ours; logs once per incarnation why not."""
        why = mismatch(self._versions, engine.versions, self._backend)
        if why and member_of(engine) not in self._reported:
            self._reported.add(member_of(engine))
            log.warning(
                "%s gets every version as files: %s. Install the same versions on both sides to send it tensors",
                engine.id, why,
            )  # fmt: skip
        return not why


def mismatch(ours: Mapping[str, str], theirs: Mapping[str, str], backend: str) -> str:
    """Return how the versions of two sides differ that could not form a group; "" if they agree or are unknown.

    torch meets over its own store, whose protocol is not documented: the release must agree, not the build (`+cpu`).
    NCCL refuses a communicator of two versions (`Mismatched NCCL version detected`).
    """
    for name in ("torch", "nccl") if backend == "nccl" else ("torch",):
        here, there = (side.get(name, "").partition("+")[0] for side in (ours, theirs))
        if here and there and here != there:
            return f"it has {name} {there}, the learner {here}"
    return ""


def _can_receive(engine: EngineInfo, last: WeightUpdate) -> bool:
    """Return whether it can receive; an engine that is behind while there are files for it is probably reading them,
    unless its host does not have them.
    """
    idle = engine.version == last.version or not last.path
    ready = engine.state is NodeState.READY and engine.epoch == last.epoch
    return (ready and idle and "distributed" in engine.transports) or _needs_broadcast(engine)


def _needs_broadcast(engine: EngineInfo) -> bool:
    """Return whether it is up, and gets a version by broadcast only. Its own version does not matter: all is sent."""
    up = engine.state in (NodeState.READY, NodeState.SYNCING, NodeState.QUARANTINED)
    return up and engine.needs_broadcast and "distributed" in engine.transports


def member_of(engine: EngineInfo) -> str:
    """Return the name of an engine's incarnation in a view."""
    return f"{engine.id}/{engine.incarnation}"


class Proof:
    """One small tensor of the published version, to send first in a new group: engines hold it already.

    An engine that receives it has connected, and nothing changes in it.
    """

    def __init__(self) -> None:
        self._next: PackedBucket | None = None
        self._held: tuple[PolicyVersion, PackedBucket | None] = (PolicyVersion(0, 0), None)

    def noting(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Yield `weights`, and keep the smallest simple tensor among them."""
        self._next = None
        for name, tensor in weights:
            size = tensor.numel() * tensor.element_size()
            if name.endswith(SIMPLE) and (self._next is None or size < self._next.flat.numel()):
                flat = tensor.detach().clone().reshape(-1).view(torch.uint8)
                self._next = PackedBucket(layout([(name, tensor)]), flat)
            yield name, tensor

    def published(self, version: PolicyVersion) -> None:
        """Note that engines will hold the tensor of the weights that were noted last."""
        if version > self._held[0]:
            self._held = version, self._next

    def of(self, members: Sequence[EngineInfo]) -> PackedBucket | None:
        """Return the tensor if every member can take part, and holds its version or serves none; None otherwise."""
        version, bucket = self._held
        unharmed = all(m.version == version or m.state is not NodeState.READY for m in members)
        return bucket if unharmed and all(m.proves for m in members) else None
