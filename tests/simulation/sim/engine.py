"""A policy that is the list of its trained seqs, and a publisher that only announces versions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sim.clock import Clock

from learner.weights import REGISTRY
from protocol.messages import TrajectoryGroup, WeightUpdate
from protocol.versions import PolicyVersion


@dataclass
class SimReport:
    """learner.interfaces.StepReport."""

    tokens_trained: int
    skipped: bool = False
    reason: str = ""
    loss: float = 0.0
    grad_norm: float = 1.0
    seconds: float = 0.0
    minibatches: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class SimBatch:
    """The groups of a step, in place of packed arrays."""

    groups: Sequence[TrajectoryGroup]
    stats: dict[str, float] = field(default_factory=dict)

    def scaled(self, algorithm: Any) -> SimBatch:
        """Return the batch itself."""
        return self

    @property
    def minibatches(self) -> list[Any]:
        """One, of one micro-batch, with every token that the policy sampled."""
        order = sorted(self.groups, key=lambda g: (g.seq, g.attempt))
        counts = [t.num_sampled for g in order for t in g.trajectories]
        return [(SimpleNamespace(trajectory=np.repeat(np.arange(len(counts)), counts)),)]


class SimEngine:
    """learner.interfaces.TrainEngine: `history` is the policy. A step takes time; `verdict` may call it not finite."""

    algorithm: Any = None
    model_files: Sequence[Path] = ()
    world_size = 1

    def __init__(self, clock: Clock, step_s: tuple[float, float], verdict: Callable[[], str]) -> None:
        self._clock, self._step_s, self._verdict = clock, step_s, verdict
        self.history: list[int] = []

    def train(self, batch: SimBatch) -> SimReport:
        self._clock.wait(self._clock.now + self._clock.rng.uniform(*self._step_s))
        if reason := self._verdict():
            return SimReport(0, skipped=True, reason=reason)
        self.history += [group.seq for group in batch.groups]
        return SimReport(sum(t.num_sampled for g in batch.groups for t in g.trajectories))

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, Any]]:
        return iter(())

    def save_state(self, directory: Path) -> None:
        (directory / "history.json").write_text(json.dumps(self.history))

    def snapshot_state(self, directory: Path) -> Callable[[], None]:
        frozen = copy.copy(self)
        frozen.history = list(self.history)
        return lambda: frozen.save_state(directory)

    def load_state(self, directory: Path) -> None:
        self.history = json.loads((directory / "history.json").read_text())

    def close(self) -> None: ...


class SimPublisher:
    """learner.weights.base.WeightPublisher, without files."""

    device = "cpu"

    def __init__(self, settings: Any, run: Any, model_files: Any, link: Any) -> None:
        self._run, self._link = run.id, link

    def publish(self, version: PolicyVersion, weights: Iterable[Any], *_: object) -> WeightUpdate:
        return WeightUpdate(run=self._run, epoch=version.epoch, step=version.step, digest="d", path="p")

    def initial(self, version: PolicyVersion, weights: Iterable[Any]) -> None:
        """Every version is published."""

    def announce(self, update: WeightUpdate, state: str) -> None:
        self._link.target(update, state)

    def send_again(self, weights: Iterable[Any]) -> None: ...

    def collect(self, in_use: Collection[PolicyVersion]) -> None: ...

    def facts(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


class SimPublish:
    """The settings of that publisher."""

    type = "disk"


REGISTRY[SimPublish] = f"{__name__}:SimPublisher"  # type: ignore[index]
