"""The weights that a replay ends with, written as a run would publish them, for nobody in particular."""

from __future__ import annotations

from pathlib import Path

from learner.config import AdapterPublishSettings, DiskPublishSettings, LearnerSettings
from learner.seams import TrainEngine
from protocol.messages import EngineInfo, ViewAnswer, WeightUpdate, WeightView
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion


class NoEngines:
    """A `learner.publish.base.Link` to a run without engines."""

    def engines(self) -> list[EngineInfo]:
        """None."""
        return []

    def target(self, update: WeightUpdate, state: str) -> None:
        """Nobody needs to hear of it."""

    def view(self, view: WeightView, ttl_s: float) -> None:
        """Nobody takes part."""

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        """None."""
        return {}

    def evaluating(self) -> bool:
        """Never."""
        return False

    def now(self) -> float:
        """Nothing is waited for."""
        return 0.0


def export(run: RunSettings, settings: LearnerSettings, engine: TrainEngine, version: PolicyVersion) -> Path:
    """Writes the weights (or the adapter, where the run trains one) as files, and returns where."""
    files = settings.publish if isinstance(settings.publish, AdapterPublishSettings) else DiskPublishSettings()
    publisher = files.build(run, engine.model_files, NoEngines())
    try:
        return Path(publisher.publish(version, engine.iter_weights(publisher.device)).path)
    finally:
        publisher.close()
