"""Settings of the trackers. Imports nothing heavy: `build()` imports the tracker's package when it is called.

`metrics.jsonl` is always written. To add a tracker: one file in `trackers/`, one settings class and one member of
`TrackerSettings`. Keys and passwords come from the environment, by the names that each package documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from protocol.settings import Settings

if TYPE_CHECKING:
    from learner.observability.trackers.base import Tracker


class TensorBoardSettings(Settings):
    """Event files on this machine."""

    type: Literal["tensorboard"] = "tensorboard"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("tensorboard",)
    directory: Path | None = None
    """Where event files go; none: `run.dir/tensorboard`."""
    flush_s: float = Field(default=30.0, ge=1)
    """Seconds between writes."""

    def build(self) -> Tracker:
        """The tracker; UserError when tensorboard is not installed."""
        from learner.observability.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(self)


class WandbSettings(Settings):
    """Weights & Biases; WANDB_API_KEY in the environment."""

    type: Literal["wandb"] = "wandb"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("wandb",)
    project: str = "foray"
    """Project."""
    entity: str = ""
    """User or team; empty: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """offline: files in the run directory, sent later by `wandb sync`."""

    def build(self) -> Tracker:
        """The tracker; UserError when wandb is not installed."""
        from learner.observability.trackers.wandb import WandbTracker

        return WandbTracker(self)


class MlflowSettings(Settings):
    """MLflow; MLFLOW_TRACKING_TOKEN or _USERNAME and _PASSWORD in the environment where the server wants them."""

    type: Literal["mlflow"] = "mlflow"
    """Tracker."""
    tracking_uri: str = ""
    """Server, e.g. http://host:5000; empty: `sqlite:///run.dir/mlflow.db`."""
    experiment: str = "foray"
    """Experiment, made where there is none."""

    @property
    def modules(self) -> tuple[str, ...]:
        """What must be importable: mlflow-skinny leaves out what a file of its own needs."""
        return ("mlflow",) if self.tracking_uri else ("mlflow", "sqlalchemy", "alembic")

    def build(self) -> Tracker:
        """The tracker; UserError when mlflow is not installed."""
        from learner.observability.trackers.mlflow import MlflowTracker

        return MlflowTracker(self)


class TrackioSettings(Settings):
    """Trackio, on this machine; TRACKIO_DIR says where."""

    type: Literal["trackio"] = "trackio"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("trackio",)
    project: str = "foray"
    """Project."""

    def build(self) -> Tracker:
        """The tracker; UserError when trackio is not installed."""
        from learner.observability.trackers.trackio import TrackioTracker

        return TrackioTracker(self)


TrackerSettings = Annotated[
    TensorBoardSettings | WandbSettings | MlflowSettings | TrackioSettings, Field(discriminator="type")
]
"""Union over `type`."""
