"""The base class of all settings, and `run`: the section that every process of a run reads.

`protocol.runtime.config` loads the YAML file. Secrets are not settings: they come from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date as Date
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from protocol.errors import UserError

SECTIONS = ("run", "rollout", "engine", "learner", "retriever", "sft", "demo", "launch")
"""Top-level keys of the YAML file. A process reads its own section and `run`; `foray` checks all of them."""

REDIS_URL_VARIABLE = "FORAY_REDIS_URL"
"""Environment variable with the Redis URL if `run.redis_url` is empty: a URL may contain a password."""

RUN_ID = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}$")

PATTERNS: dict[str, str] = {
    RUN_ID.pattern: "an id has at most 63 lower-case letters, digits and hyphens, and begins with a letter or a "
    "digit, for example qwen2-5"
}
"""Pattern of a text field -> its description in error messages."""


class Settings(BaseModel):
    """Base of every settings class: frozen, no unknown keys; `descriptions` reads the docstring under a field.

    NaN and infinity are refused: every comparison with NaN is false, so a bound of NaN would have no effect.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _home(cls, value: Any) -> Any:
        """Replace `~`: shells leave it in `run.dir=~/runs`."""
        return value.expanduser() if isinstance(value, Path) and value.parts[:1] == ("~",) else value


def union_of(kinds: Iterable[type[Settings]], *, default: str = "") -> Any:
    """Return the type of a field that holds settings of any of `kinds`, the keys of a registry.

    The value's `type` selects the class; a value without one is of type `default`, or refused if there is none.
    """
    if not default:
        return Annotated[Union[tuple(kinds)], Field(discriminator="type")]  # noqa: UP007

    def tag(value: Any) -> str:
        return str(value.get("type", default) if isinstance(value, Mapping) else getattr(value, "type", default))

    members = tuple(Annotated[kind, Tag(kind.model_fields["type"].default)] for kind in kinds)
    return Annotated[Union[members], Discriminator(tag)]  # noqa: UP007


class TraceSettings(Settings):
    """OpenTelemetry traces, one per trajectory group (docs/observability.md, "Traces"). They need the extra `otel`."""

    exporter: Literal["none", "otlp", "file"] = "none"
    """none: no traces. otlp: to the collector of OTEL_EXPORTER_OTLP_ENDPOINT (OpenTelemetry's variables, such as
    OTEL_EXPORTER_OTLP_HEADERS, apply), or this host. file: OTLP JSON lines in `run.dir/traces`, one file per
    process."""
    share: float = Field(default=0.05, gt=0, le=1)
    """Share of the groups to trace. All processes choose the same groups."""


class RunSettings(Settings):
    """Settings that all processes of a run share."""

    id: str = Field(default="run", pattern=RUN_ID.pattern)
    """Name of the run: prefix of its Redis keys and name of its directory."""
    dir: Path = Field(default=Path("runs/run"))
    """Run directory: logs, weights, checkpoints, trajectories, metrics."""
    redis_url: str = ""
    """redis://host:port/db, rediss:// (TLS), unix:///path, redis+sentinel://h1,h2/name, or file:///path: a file with a
    redis:// or rediss:// URL, read again at every connection, for a Redis that may move. Empty: the variable
    FORAY_REDIS_URL, or the launcher starts a Redis in the run directory."""
    model: Path = Field(default=Path("model"))
    """Directory of the initial policy in Hugging Face layout, including the tokenizer."""
    date: Date | None = None
    """Date (2026-01-31) for chat templates that contain one, so that prompts stay the same every day. null: `foray up`
    sets the first day of the run (UTC)."""
    seed: int = Field(default=0, ge=0, lt=1 << 48)
    """Random seed of the sampler and of the learner."""
    group_size: int = Field(default=8, ge=1, le=512)
    """Trajectories per question (G)."""
    groups_per_step: int = Field(default=16, ge=1)
    """Trajectory groups per step (B)."""
    max_lag: int = Field(default=2, ge=0)
    """Maximum lag, in steps, between the version that sampled a token and the version that trains on it."""
    steps: int = Field(default=100, ge=1)
    """Steps of the whole run. Each trains one batch, with one optimiser update or more (minibatches, epochs)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts. The learner divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of training rollouts: sample from the most likely tokens with this total probability. 1: all.
    Log-probs are of the full distribution on both sides (docs/algorithms.md, "Top-p and top-k sampling")."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample training rollouts from this many of the most likely tokens, at least 2. -1: all. See top_p."""
    trace: TraceSettings = TraceSettings()
    """Traces from question to step."""

    @field_validator("date", mode="before")
    @classmethod
    def _is_no_number(cls, day: object) -> object:
        if isinstance(day, int | float):  # pydantic reads seconds since 1970
            raise ValueError("must be a date such as 2026-01-31")
        return day

    @field_validator("top_k")
    @classmethod
    def _samples(cls, top_k: int) -> int:
        if top_k in (0, 1):
            raise ValueError(
                f"top_k = {top_k} would make all trajectories of a group equal: use 2 or more, or -1 for all tokens"
            )
        return top_k

    def with_redis(self, environ: Mapping[str, str]) -> RunSettings:
        """Return these settings with a Redis URL, from `environ` if the setting is empty. Raises UserError if none."""
        url = self.redis_url or environ.get(REDIS_URL_VARIABLE, "")
        if not url:
            raise UserError(
                "no Redis is configured",
                why="run.redis_url is empty, and only `foray up` starts a Redis itself",
                todo=f"set run.redis_url=redis://127.0.0.1:6379/0 or {REDIS_URL_VARIABLE}, or use `foray up`",
            )
        return self.model_copy(update={"redis_url": url})

    @property
    def weights_dir(self) -> Path:
        """Directory of the published policy versions."""
        return self.dir / "weights"

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of the learner's checkpoints."""
        return self.dir / "checkpoints"
