"""Settings of validation during training: `learner.eval`. Fields only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from protocol.settings import Settings


class ValidationSuite(Settings):
    """Questions to validate with."""

    path: Path
    """File of questions; the formats are in docs/data.md."""
    name: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")
    """Name in metrics. "": each data set that the records name is reported separately."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first questions of each data set. null: all."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value


class ValidationSettings(Settings):
    """Validation: every few steps the policy answers questions that it is not trained on, while training goes on."""

    suites: tuple[ValidationSuite, ...] = ()
    """Files of questions: [dev.jsonl], or [{path: dev.parquet, limit: 100}, ..]. Empty: no validation."""
    every: int = Field(default=25, ge=1)
    """Steps between validations. The policy after the last step is always validated."""
    at_start: bool = True
    """Validate the initial model too."""
    n: int = Field(default=1, ge=1, le=512)
    """Episodes per question; metrics are averaged over them first."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """Sampling temperature; 0 is greedy."""
    concurrency: int = Field(default=64, ge=1, le=4096)
    """Maximum number of episodes in flight."""
    best: Literal["em", "f1", "cover_em", "reward", ""] = "em"
    """Metric that selects the best checkpoint, which is kept: the highest mean over the suites. A checkpoint is written
    for each validation. "": neither."""
