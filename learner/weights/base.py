"""Interfaces of weight publishing: a transport of weights, and its link to the engines' nodes.

Input: a version and its tensors. Output: what to announce to the engines. A transport never makes an engine generate
with the new version before `announce`, which is fenced by the learner's lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from protocol.errors import ForayError
from protocol.messages import NEEDS_FILES, EngineInfo, NodeState, ViewAnswer, WeightUpdate, WeightView
from protocol.versions import PolicyVersion, VersionPin

if TYPE_CHECKING:
    import torch


class BadWeights(ForayError):
    """The weights are not finite or not plausible (`learner.weights.checks`): no engine receives them."""


class PackingError(ForayError):
    """A bucket does not contain the tensors that were packed into it."""


class GatheredWeights:
    """The policy's tensors, gathered at each iteration; all ranks must iterate to the end."""

    def __init__(self, gather: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._gather = gather

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._gather()


class EngineLink(Protocol):
    """The run in Redis, as publishing needs it; implemented by `learner.delivery.store.RunStore`. Thread-safe.

    Raises RedisUnavailable; writing methods also raise StateLost, and Fenced if the lease is not ours.
    """

    def engines(self) -> list[EngineInfo]:
        """Return engines whose registration is alive."""

    def target(self, update: WeightUpdate, state: str) -> None:
        """Announce the version that engines must load; `state` is "ready" or "done"."""

    def view(self, view: WeightView, ttl_s: float, plan: bytes = b"") -> None:
        """Write the state of the transfer, and its plan if given; wake the nodes."""

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        """Return the last answer of each member of a view."""

    def next_answers(self, epoch: int, number: int, after: str, wait_s: float) -> tuple[dict[str, ViewAnswer], str]:
        """Return the answers that follow the place `after` ("0": all), and the place of the last one.

        Waits up to `wait_s` for the first.
        """

    def pin(self) -> VersionPin | None:
        """Return the pin of a running evaluation."""

    def now(self) -> float:
        """Return seconds on Redis' clock, which all hosts share."""


def in_use(engines: Iterable[EngineInfo]) -> set[PolicyVersion]:
    """Return versions whose files may be open: those that engines have loaded, and those that they report as being
    read.
    """
    held: set[PolicyVersion] = set()
    for engine in engines:
        held.add(engine.version)
        # a node's detail ends with the version that it is about to load: "1.7", "reading 1.7"
        named = PolicyVersion.parse(engine.detail.rpartition(" ")[2])
        if named is not None:
            held.add(named)
    return held


def wants_files(engine: EngineInfo) -> bool:
    """Return whether the engine cannot hold the initial model that was announced: its node has another model, does not
    know this kind of announcement, or did not launch the engine."""
    unusable = engine.detail.startswith(NEEDS_FILES) or "cannot be verified" in engine.detail
    return unusable and engine.state not in (NodeState.DRAINING, NodeState.GONE)


class WeightPublisher(Protocol):
    """A weight transport. All calls come from the training thread, in this order for every version."""

    @property
    def device(self) -> str:
        """Return the device of the tensors for `publish`: "cpu" or "cuda"."""

    def publish(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """Make `version` available. Raises BadWeights, OSError, Fenced.

        weights: Hugging Face name -> tensor; iterated again if the packed tensors turn out wrong.
        """

    def initial(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate | None:
        """Return what announces `run.model` itself as `version`; None if it must be published.

        weights: as for `publish`, on the meta device; iterated to the end.
        """

    def send_again(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the announced version to engines that can get it in no other way, if any wait.

        weights: those of that version, as for `publish`; iterated only if an engine waits, then to the end. A failed
        transfer is not raised. Raises StateLost, Fenced.
        """

    def announce(self, update: WeightUpdate, state: str) -> None:
        """Make the result of `publish` or `initial` the target; may be repeated.

        Raises RedisUnavailable, StateLost, Fenced.
        """

    def collect(self, in_use: Collection[PolicyVersion]) -> None:
        """Remove old versions, except the newest few and those in use."""

    def facts(self) -> Mapping[str, float]:
        """Return values of the last `publish` and counters since the start, for the metrics; names begin with
        `publish_`."""

    def close(self) -> None:
        """Stop threads and close groups."""


class Announcement:
    """The target that this learner last announced. Thread-safe; raises the errors of the link."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._update: WeightUpdate | None = None
        self._state = ""

    @property
    def update(self) -> WeightUpdate | None:
        """Return the last announcement."""
        return self._update

    def set(self, update: WeightUpdate, state: str) -> None:
        """Announce `update`, with the path added meanwhile if it has none itself."""
        with self._lock:
            known = self._update
            if known is not None and known.version == update.version and not update.path:
                update = known
            self._link.target(update, state)
            self._update, self._state = update, state

    def add_path(self, update: WeightUpdate) -> bool:
        """Announce `update` in place of the same version without a path; return False if that is not the target."""
        with self._lock:
            known = self._update
            if known is None or known.version != update.version or known.path:
                return False
            self._link.target(update, self._state)
            self._update = update
            return True
