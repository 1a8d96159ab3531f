"""Experiment trackers: destinations of step metrics besides `metrics.jsonl`."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from learner.config.trackers import MlflowSettings, TensorBoardSettings, TrackerSettings, TrackioSettings, WandbSettings
from protocol.settings import Settings

if TYPE_CHECKING:
    from learner.observability.trackers.base import Tracker

REGISTRY: dict[type[Settings], str] = {
    TensorBoardSettings: "learner.observability.trackers.tensorboard:TensorBoardTracker",
    WandbSettings: "learner.observability.trackers.wandb:WandbTracker",
    MlflowSettings: "learner.observability.trackers.mlflow:MlflowTracker",
    TrackioSettings: "learner.observability.trackers.trackio:TrackioTracker",
}
"""Settings class -> "module:Class"; the class takes the settings."""


def build_tracker(settings: TrackerSettings) -> Tracker:
    """Return an instance of the tracker that `settings` select. Raises UserError if its package is not installed."""
    return cast("Tracker", resolve_name(REGISTRY[type(settings)])(settings))
