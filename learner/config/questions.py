"""Settings of the training questions: `learner.questions`. Fields only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from protocol.settings import Settings


class QuestionSource(Settings):
    """One file of questions, and its share of the training questions."""

    path: Path
    """File, or a folder that `datasets` saved; the formats are in docs/data.md."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the training questions, relative to the other sources; set it for all of them or for none. null: the
    number of questions."""
    source: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")
    """Name in metrics and for `sources` of a reward. "": the name in the records, or that of the data set."""
    format: str = ""
    """Format of the records (docs/data.md). "": that of the first record."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value


def _form(value: Any) -> str:
    return "list" if isinstance(value, list | tuple | dict) else "path"


Questions = Annotated[
    Annotated[Path, Tag("path")] | Annotated[tuple[QuestionSource, ...], Tag("list")],
    Discriminator(_form),
]
"""One file, or several sources."""


def question_sources(questions: Path | str | Sequence[QuestionSource | Path | str]) -> tuple[QuestionSource, ...]:
    """Return the sources of `questions`: one file, or several."""
    several = [questions] if isinstance(questions, Path | str) else questions
    return tuple(item if isinstance(item, QuestionSource) else QuestionSource(path=Path(item)) for item in several)
