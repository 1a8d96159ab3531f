"""Interfaces of weight publishing: a transport of weights, and its link to the engines' nodes.

A version and its tensors go in; what must be announced to engines comes out. Nothing a transport does makes
an engine generate with the new version before `announce`, which is fenced by the learner's lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from protocol.errors import ForayError
from protocol.messages import EngineInfo, ViewAnswer, WeightUpdate, WeightView
from protocol.versions import PolicyVersion

if TYPE_CHECKING:
    import torch


class BadWeights(ForayError):
    """A tensor is not finite, or these are no policy's weights (`learner.weights.checks`): no engine gets them."""


class GatheredWeights:
    """The policy's tensors, gathered each time that it is iterated; by all ranks together, to the end."""

    def __init__(self, gather: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._gather = gather

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._gather()


class EngineLink(Protocol):
    """The run in Redis, as publishing sees it; `learner.delivery.store.RunStore` is the real one. Thread-safe.

    Raises RedisUnavailable; what writes also raises StateLost, and Fenced when the lease is not ours.
    """

    def engines(self) -> list[EngineInfo]:
        """Return engines whose registration is alive."""
        ...

    def target(self, update: WeightUpdate, state: str) -> None:
        """Announce the version that engines must hold; `state` is "ready" or "done"."""
        ...

    def view(self, view: WeightView, ttl_s: float) -> None:
        """Write where the transfer stands."""
        ...

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        """Return what the members of a view said last, by member."""
        ...

    def evaluating(self) -> bool:
        """Return whether an evaluation wants the versions to stand still."""
        ...

    def now(self) -> float:
        """Return seconds by the clock of Redis, which all hosts share."""
        ...


def in_use(engines: Iterable[EngineInfo]) -> set[PolicyVersion]:
    """Return versions whose files may be open: those that engines hold, and those that they say they are reading just
    now."""
    held: set[PolicyVersion] = set()
    for engine in engines:
        held.add(engine.version)
        # a node ends its detail with the version it is about to load: "1.7", "reading 1.7"
        named = PolicyVersion.parse(engine.detail.rpartition(" ")[2])
        if named is not None:
            held.add(named)
    return held


class WeightPublisher(Protocol):
    """A transport. All calls come from the training thread, in this order for every version."""

    @property
    def device(self) -> str:
        """Where `publish` wants the tensors: "cpu" or "cuda"."""
        ...

    def publish(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """Make `version` available. Raises BadWeights, OSError, Fenced.

        weights: Hugging Face name -> tensor; iterated again when what was made of them turns out wrong.
        """
        ...

    def announce(self, update: WeightUpdate, state: str) -> None:
        """Make what `publish` returned the target; may be repeated. Raises RedisUnavailable, StateLost, Fenced."""
        ...

    def collect(self, in_use: Collection[PolicyVersion]) -> None:
        """Remove old versions, but for the newest few and those in use."""
        ...

    def facts(self) -> Mapping[str, float]:
        """Return numbers of the last `publish` and counters since the start, for the metrics; names begin with
        `publish_`."""
        ...

    def close(self) -> None:
        """End threads and groups."""
        ...


class Announcement:
    """The target as this learner last announced it. Thread-safe; Link's errors pass through."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._update: WeightUpdate | None = None
        self._state = ""

    @property
    def update(self) -> WeightUpdate | None:
        """What was announced last."""
        return self._update

    def set(self, update: WeightUpdate, state: str) -> None:
        """Announce `update`; with the path that was found for it meanwhile, where it has none itself."""
        with self._lock:
            known = self._update
            if known is not None and known.version == update.version and not update.path:
                update = known
            self._link.target(update, state)
            self._update, self._state = update, state

    def add_path(self, update: WeightUpdate) -> bool:
        """Announce `update` in place of the same version without a path; False when that is not the target."""
        with self._lock:
            known = self._update
            if known is None or known.version != update.version or known.path:
                return False
            self._link.target(update, self._state)
            self._update = update
            return True
