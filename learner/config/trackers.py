"""Settings of the experiment trackers: fields only, no tracker's package is imported.

`metrics.jsonl` is always written. To add a tracker: write one file in `learner/observability/trackers/`, its settings
class and union member here, and one line in that folder's `REGISTRY`. Keys and passwords come from the environment
variables that each package documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol.settings import Settings


class TableSettings(Settings):
    """What a tracker gets besides numbers."""

    table_every: int = Field(default=0, ge=0)
    """Steps between two tables of trajectories: question, answer, reward, status, lag, text. 0: none. Their texts go to
    the tracker's service."""
    table_rows: int = Field(default=8, ge=1, le=512)
    """Trajectories per table, of different groups as far as possible."""


class TensorBoardSettings(TableSettings):
    """Local event files."""

    type: Literal["tensorboard"] = "tensorboard"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("tensorboard",)
    directory: Path | None = None
    """Directory of the event files; null: `run.dir/tensorboard`."""
    flush_s: float = Field(default=30.0, ge=1)
    """Seconds between writes."""


class WandbSettings(TableSettings):
    """Weights & Biases; WANDB_API_KEY in the environment."""

    type: Literal["wandb"] = "wandb"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("wandb",)
    project: str = "foray"
    """Project."""
    entity: str = ""
    """User or team; empty: the default of the API key."""
    mode: Literal["online", "offline"] = "online"
    """offline: write files to the run directory, for a later `wandb sync`."""


class MlflowSettings(TableSettings):
    """MLflow; MLFLOW_TRACKING_TOKEN or _USERNAME and _PASSWORD in the environment if the server needs them."""

    type: Literal["mlflow"] = "mlflow"
    """Tracker."""
    tracking_uri: str = ""
    """Server, e.g. http://host:5000; empty: `sqlite:///run.dir/mlflow.db`."""
    experiment: str = "foray"
    """Name of the experiment; created if missing."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules that must be importable: mlflow-skinny lacks those that a local database needs."""
        return ("mlflow",) if self.tracking_uri else ("mlflow", "sqlalchemy", "alembic")


class TrackioSettings(TableSettings):
    """Trackio, local; TRACKIO_DIR sets its directory."""

    type: Literal["trackio"] = "trackio"
    """Tracker."""
    modules: ClassVar[tuple[str, ...]] = ("trackio",)
    project: str = "foray"
    """Project."""


TrackerSettings = Annotated[
    TensorBoardSettings | WandbSettings | MlflowSettings | TrackioSettings, Field(discriminator="type")
]
"""Union over `type`."""
