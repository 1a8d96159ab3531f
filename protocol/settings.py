"""Settings: one YAML tree, dotted overrides, and errors that name the nearest right key.

Every process reads the same file and takes two of its sections: `run` (what all must agree on) and its own. So
there is nothing to propagate. Unknown keys are refused with a suggestion. Secrets never live here: they come from
the environment.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import UserError
from protocol.redaction import SHOWN

SECTIONS = ("run", "rollout", "engine", "learner", "retriever", "demo", "launch")
"""Top-level names of the tree. A process ignores the sections of the others; `foray` checks them all."""

REDIS_URL_VARIABLE = "FORAY_REDIS_URL"
"""Environment variable that says where Redis is when `run.redis_url` is empty: a URL may hold a password."""

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, OverflowError)
"""What PyYAML raises: dates such as 2026-99-99 and numbers such as 0b2 are ValueErrors there."""

_MAY_BE_SECRET = re.compile(r"(key|token|password|secret)(_env|_variable)?$", re.IGNORECASE)

RUN_ID = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}$")


class Settings(BaseModel):
    """Base of every settings class: frozen, strict about keys, the docstring under a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A field whose default a subclass changes means what it meant: its description is inherited."""
        for name, field in cls.model_fields.items():
            bases = (base.model_fields.get(name) for base in cls.__mro__[1:] if issubclass(base, BaseModel))
            if field.description is None:
                field.description = next((f.description for f in bases if f is not None and f.description), None)


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


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 300

S = TypeVar("S", bound=Settings)


def read_tree(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The YAML file as a dict with `a.b=c` overrides applied (values are YAML: numbers, lists, null).

    Raises UserError for a missing or malformed file, an unknown section, or an override that is not `key=value`.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _load_yaml(path)
    for item in overrides:
        key, found, raw = item.partition("=")
        if not found or not key:
            raise UserError(f"override {item!r} is not of the form key=value", todo="write e.g. learner.lr=1e-4")
        try:
            value = yaml.safe_load(raw)
        except NOT_YAML as error:
            raise UserError(f"the value of override {item!r} is not YAML", why=" ".join(str(error).split())) from None
        _assign(tree, key.split("."), _number(value), item)
    for name in tree:
        if name not in SECTIONS:
            raise UserError(f"unknown section {name!r}", todo=_suggest(str(name), SECTIONS))
    return tree


def section(tree: Mapping[str, Any], name: str, kind: type[S]) -> S:
    """Section `name` of the tree as `kind`, or UserError that names each wrong key and what is legal there."""
    value = tree.get(name) or {}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise UserError("\n       ".join(_explain(error, name, kind))) from None


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


def _suggest(name: str, legal: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, legal, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else "known here: " + ", ".join(sorted(legal))


def _explain(error: ValidationError, name: str, kind: type[Settings]) -> Iterator[str]:
    for item in error.errors():
        where = ".".join([name, *(str(part) for part in item["loc"])])
        if item["type"] == "extra_forbidden":
            legal = _legal_keys(kind, [str(part) for part in item["loc"][:-1]])
            yield f"unknown key {where!r}: {_suggest(str(item['loc'][-1]), legal)}"
        elif item["type"] == "union_tag_not_found":
            known = ", ".join(_legal_tags(kind, [str(part) for part in item["loc"]]))
            yield f"{where} does not say what it is: add {where}.type = one of {known}"
        else:
            # a few lines of YAML can spell a value of gigabytes, by aliases of aliases
            yield f"{where} = {_SHORT.repr(_shown(where, item['input']))}: {item['msg']}"


def _shown(name: str, value: Any) -> Any:
    """`value` without what may be a secret: somebody may have written the key where its variable's name belongs."""
    if isinstance(value, Mapping):
        return {key: SHOWN if _MAY_BE_SECRET.search(str(key)) else inner for key, inner in value.items()}
    return SHOWN if isinstance(value, str) and _MAY_BE_SECRET.search(name) else value


def _legal_tags(kind: type[Settings], path: Sequence[str]) -> list[str]:
    """Values that `type` may have in the union at `path` below `kind`."""
    *parents, last = path
    members: list[type[BaseModel]] = [kind]
    for part in parents:
        members = [m for c in members if part in c.model_fields for m in _models(c.model_fields[part].annotation)]
    found = [m for c in members if last in c.model_fields for m in _models(c.model_fields[last].annotation)]
    return sorted({tag for m in found for tag in _tags(m)})


def _legal_keys(kind: type[Settings], path: Sequence[str]) -> list[str]:
    """Field names at `path` below `kind`; members of a union are searched by their tag."""
    candidates: list[type[BaseModel]] = [kind]
    for part in path:
        below = [m for c in candidates if part in c.model_fields for m in _models(c.model_fields[part].annotation)]
        # a union's error path names the chosen member's tag after the field
        candidates = below or [c for c in candidates if part in _tags(c)] or candidates
    return sorted({field for c in candidates for field in c.model_fields})


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) for m in _models(arg)]


def _tags(kind: type[BaseModel]) -> tuple[str, ...]:
    field = kind.model_fields.get("type")
    return tuple(getattr(field.annotation, "__args__", ())) if field else ()
