"""Settings of the experiment trackers: fields only, no tracker's package is imported.

`metrics.jsonl` is always written. To add a tracker: one file in `learner/observability/trackers/`, its settings class
and union member here, and one line in that folder's `REGISTRY`. Keys and passwords come from the environment, under
the names that each package documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol.settings import Settings


class TensorBoardSettings(Settings):
    """Event files on this machine."""

    type: Literal["tensorboard"] = "tensorboard"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("tensorboard",)
    directory: Path | None = None
    """Where event files go; none: `run.dir/tensorboard`."""
    flush_s: float = Field(default=30.0, ge=1)
    """Seconds between writes."""


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


class TrackioSettings(Settings):
    """Trackio, on this machine; TRACKIO_DIR says where."""

    type: Literal["trackio"] = "trackio"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("trackio",)
    project: str = "foray"
    """Project."""


TrackerSettings = Annotated[
    TensorBoardSettings | WandbSettings | MlflowSettings | TrackioSettings, Field(discriminator="type")
]
"""Union over `type`."""
