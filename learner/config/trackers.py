"""Settings of the experiment trackers: fields only, no tracker's package is imported.

`metrics.jsonl` is always written. To add a tracker: write one file in `learner/observability/trackers/`, its settings
class and union member here, and one line in that folder's `REGISTRY`. Keys and passwords come from the environment
variables that each package documents.
"""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol.settings import Settings

MLFLOW_URI = "MLFLOW_TRACKING_URI"
"""Environment variable with MLflow's server."""


class TableSettings(Settings):
    """What a tracker gets besides numbers."""

    table_every: int = Field(default=0, ge=0)
    """Steps between two tables of trajectories: question, answer, reward, status, lag, text of 8. 0: none. Their
    texts go to the tracker's service."""


class TensorBoardSettings(TableSettings):
    """Local event files in `run.dir/tensorboard`."""

    type: Literal["tensorboard"] = "tensorboard"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("tensorboard",)


class ProjectSettings(TableSettings):
    """A tracker with projects."""

    project: str = "foray"
    """Project."""


class WandbSettings(ProjectSettings):
    """Weights & Biases. The environment has WANDB_API_KEY, WANDB_ENTITY (user or team) and WANDB_MODE (`offline`: files
    in the run directory, for a later `wandb sync`)."""

    type: Literal["wandb"] = "wandb"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("wandb",)


class MlflowSettings(TableSettings):
    """MLflow. The environment has MLFLOW_TRACKING_URI (the server; without it `sqlite:///run.dir/mlflow.db`),
    MLFLOW_EXPERIMENT_NAME (`foray` without it), and MLFLOW_TRACKING_TOKEN or _USERNAME and _PASSWORD if needed."""

    type: Literal["mlflow"] = "mlflow"
    """Tracker."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules that must be importable: mlflow-skinny lacks those that a local database needs."""
        return ("mlflow",) if os.environ.get(MLFLOW_URI) else ("mlflow", "sqlalchemy", "alembic")


class TrackioSettings(ProjectSettings):
    """Trackio, local; TRACKIO_DIR sets its directory."""

    type: Literal["trackio"] = "trackio"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("trackio",)


TrackerSettings = Annotated[
    TensorBoardSettings | WandbSettings | MlflowSettings | TrackioSettings, Field(discriminator="type")
]
"""Union over `type`."""
