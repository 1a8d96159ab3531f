"""Settings: one YAML tree, dotted overrides, and errors that name the nearest right key.

Every process reads the same file and takes two of its sections: `run` (what all must agree on) and its own. So
there is nothing to propagate. Unknown keys are refused with a suggestion. Secrets never live here: they come from
the environment.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from datetime import date as Date
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from protocol.errors import UserError
from protocol.runtime.settings_errors import PATTERNS, explain, repaired, suggest

SECTIONS = ("run", "rollout", "engine", "learner", "retriever", "demo", "launch")
"""Top-level names of the tree. A process ignores the sections of the others; `foray` checks them all."""

REDIS_URL_VARIABLE = "FORAY_REDIS_URL"
"""Environment variable that says where Redis is when `run.redis_url` is empty: a URL may hold a password."""

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, OverflowError)
"""What PyYAML raises: dates such as 2026-99-99 and numbers such as 0b2 are ValueErrors there."""

RUN_ID = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}$")
PATTERNS[RUN_ID.pattern] = (
    "an id has lower-case letters, digits and hyphens (at most 63), and begins with a letter or a digit: e.g. qwen2-5"
)


class Settings(BaseModel):
    """Base of every settings class: frozen, strict about keys; `field_docs` reads the docstring under a field.

    No setting is NaN or infinite: comparisons with NaN all fail, so a bound of NaN would switch off what it bounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunSettings(Settings):
    """What two processes must agree on."""

    id: str = Field(default="run", pattern=RUN_ID.pattern)
    """Name of the run: prefix of every Redis key and name of its directory."""
    dir: Path = Field(default=Path("runs/run"))
    """Run directory: logs, weights, checkpoints, trajectories, metrics."""
    redis_url: str = ""
    """redis://host:port/db, rediss:// (TLS), unix:///path, redis+sentinel://h1,h2/name or redis+cluster://h1,h2. Empty:
    the variable FORAY_REDIS_URL, or the launcher starts a Redis of its own in the run directory."""
    model: Path = Field(default=Path("model"))
    """Directory of the initial policy in Hugging Face layout, tokenizer included."""
    date: Date | None = None
    """The day (2026-01-31) that chat templates with a date in them say, so that a prompt is the same every day. null:
    `foray up` sets the first day of the run (UTC)."""
    seed: int = 0
    """Seed of the sampler and of everything that draws in the learner."""
    group_size: int = Field(default=8, ge=1, le=512)
    """Trajectories per question (G)."""
    groups_per_step: int = Field(default=16, ge=1)
    """Trajectory groups in one optimiser step (B)."""
    max_lag: int = Field(default=2, ge=0)
    """Most steps between the version that sampled a token and the one that trains on it."""
    steps: int = Field(default=100, ge=1)
    """Optimiser steps of the whole run."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts; the learner divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Training rollouts draw from the likeliest tokens that make up this probability (nucleus sampling); 1: from all.
    Log-probs are of the whole distribution on both sides (docs/algorithms.md, "What the sampler leaves out")."""
    top_k: int = Field(default=-1, ge=-1)
    """Training rollouts draw from this many of the likeliest tokens, at least 2; -1: from all. As for top_p."""

    @field_validator("date", mode="before")
    @classmethod
    def _is_no_number(cls, day: object) -> object:
        if isinstance(day, int | float):  # pydantic reads seconds since 1970
            raise ValueError("a date belongs here, e.g. 2026-01-31")
        return day

    @field_validator("top_k")
    @classmethod
    def _samples(cls, top_k: int) -> int:
        if top_k in (0, 1):
            raise ValueError(
                f"top_k {top_k} draws nothing: every trajectory of a group would be the same. Say 2 or more, or -1"
            )
        return top_k

    def with_redis(self, environ: Mapping[str, str]) -> RunSettings:
        """These settings with a Redis URL, from `environ` where the setting is empty; raises UserError without one."""
        url = self.redis_url or environ.get(REDIS_URL_VARIABLE, "")
        if not url:
            raise UserError(
                "no Redis to talk to",
                why="run.redis_url is empty; only `foray up` starts a Redis of its own",
                todo=f"set run.redis_url=redis://127.0.0.1:6379/0 or {REDIS_URL_VARIABLE}, or use `foray up`",
            )
        return self.model_copy(update={"redis_url": url})

    @property
    def weights_dir(self) -> Path:
        """Where published policy versions live."""
        return self.dir / "weights"

    @property
    def checkpoint_dir(self) -> Path:
        """Where the learner's checkpoints live."""
        return self.dir / "checkpoints"


S = TypeVar("S", bound=Settings)


class Tree(dict[str, Any]):
    """A tree of settings that knows how its overrides were spelt: `spelt` has the text of each by its path, where YAML
    read it as something other than text."""

    def __init__(self, tree: Mapping[str, Any], spelt: Mapping[tuple[str, ...], str]) -> None:
        super().__init__(tree)
        self.spelt = dict(spelt)


def read_tree(path: Path | None, overrides: Sequence[str] = ()) -> Tree:
    """The YAML file as a dict with `a.b=c` overrides applied (values are YAML: numbers, lists, null).

    Raises UserError for a missing or malformed file, an unknown section, or an override that is not `key=value`.
    """
    tree = _load_yaml(path) if path is not None else {}
    return with_overrides(Tree(tree, {}), overrides)


def with_overrides(tree: Tree, overrides: Sequence[str]) -> Tree:
    """`tree` with `a.b=c` overrides applied in place; raises UserError as `read_tree` does."""
    for item in overrides:
        key, found, raw = item.partition("=")
        if not found or not key:
            raise not_an_override(item)
        try:
            value = yaml.safe_load(raw)
        except NOT_YAML as error:
            raise UserError(f"the value of override {item!r} is not YAML", why=" ".join(str(error).split())) from None
        value = _number(value)
        path = tuple(key.split("."))
        _assign(tree, list(path), value, item)
        # what stood at or below this place is gone, and how it was spelt with it
        tree.spelt = {old: text for old, text in tree.spelt.items() if old[: len(path)] != path}
        if not isinstance(value, str):
            tree.spelt[path] = raw
    for name in tree:
        if name not in SECTIONS:
            raise UserError(f"unknown section {name!r}", todo=suggest(str(name), SECTIONS))
    return tree


def not_an_override(item: str) -> UserError:
    """The error for an argument that should have been an override."""
    return UserError(f"override {item!r} is not of the form key=value", todo="write e.g. learner.optim.lr=1e-4")


def section(tree: Mapping[str, Any], name: str, kind: type[S]) -> S:
    """Section `name` of the tree as `kind`, or UserError that names each wrong key and what is legal there."""
    value = tree.get(name) or {}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        wrong = error
    spelt = tree.spelt if isinstance(tree, Tree) else {}
    below = {path[1:]: text for path, text in spelt.items() if path[0] == name}
    try:
        if (meant := repaired(value, wrong, kind, below)) is not None:
            return kind.model_validate(meant)
    except ValidationError as error:
        wrong = error
    raise UserError("\n       ".join(explain(wrong, name, kind)))


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", why=str(error)) from None
    except OSError as error:
        near = difflib.get_close_matches(path.name, _siblings(path), n=1, cutoff=0.5)
        raise UserError(
            f"cannot read the configuration file {path}",
            why=error.strerror or str(error),
            todo=f"did you mean {path.parent / near[0]}?" if near else "give the path of an existing YAML file",
        ) from None
    try:
        tree = yaml.safe_load(text)
    except NOT_YAML as error:
        raise UserError(f"{path} is not valid YAML", why=" ".join(str(error).split())) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}, not a tree of sections", todo=f"use {SECTIONS}")
    return tree


def _siblings(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-4 (no dot) as text; every person means the number.
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def _assign(tree: dict[str, Any], path: list[str], value: Any, item: str) -> None:
    for name in path[:-1]:
        child = tree.get(name)
        if child is None:
            child = tree[name] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {item!r} goes below {name!r}, which holds a single value")
        tree = child
    tree[path[-1]] = value
