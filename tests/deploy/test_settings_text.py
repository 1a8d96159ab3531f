"""Every field of text or of a path, in all settings: an override is what was typed, whatever YAML makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest
from pydantic import create_model

from deploy.config import RunConfig
from protocol.errors import UserError
from protocol.runtime.config import read_tree, section
from protocol.runtime.settings_errors import _models
from protocol.settings import Settings


def settings_below(kind: type[Settings], found: dict[type[Settings], None]) -> dict[type[Settings], None]:
    found[kind] = None
    for field in kind.model_fields.values():
        for inner in _models(field.annotation):
            if issubclass(inner, Settings) and inner not in found:
                settings_below(inner, found)
    return found


def text_fields() -> Iterator[tuple[type[Settings], str]]:
    for kind in settings_below(RunConfig, {}):
        for name, field in kind.model_fields.items():
            union = isinstance(field.annotation, UnionType)
            parts = set(get_args(field.annotation)) if union else {field.annotation}
            if parts <= {str, Path, type(None)} and parts & {str, Path}:
                yield kind, name


FIELDS = list(text_fields())


def test_the_walk_finds_the_fields() -> None:
    names = {f"{kind.__name__}.{name}" for kind, name in FIELDS}
    assert {"RunSettings.id", "RunSettings.model", "TransformerEncoderSettings.query_prefix"} <= names
    assert len(names) > 90


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_a_text_is_what_was_typed(kind: type[Settings], name: str) -> None:
    """Where the field refuses the text itself, or others are missing, the error is about that."""
    outer: Any = create_model("Outer", __base__=Settings, inner=(kind, ...))
    field = kind.model_fields[name]
    for text in ("query: ", "2024", "1e5", "true", "2024-01-01", "[a]"):
        try:
            read = getattr(section(read_tree(None, [f"demo.inner.{name}={text}"]), "demo", outer).inner, name)
        except UserError as error:
            structure = text in ("query: ", "[a]") and Path in {field.annotation, *get_args(field.annotation)}
            assert structure or not re.search(r"must be (text|a path)", str(error))
        else:
            assert str(read) == text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.date=soon", "must be a date such as 2026-01-31"),
        ("run.date=0", "must be a date such as 2026-01-31"),
        ("run.top_k=0", "top_k = 0 would make all trajectories of a group equal"),
        ("run.model=", "must be a path"),
        ("run.dir=null", "must be a path"),
        ("run.model=[a]", "must be a path"),
        ("run.model={a: b}", "must be a path"),
        ("run.redis_url=null", "must be text"),
        ("run.id=qwen2.5", "lower-case letters, digits and hyphens"),
    ],
)
def test_what_is_refused_is_refused_in_words(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        section(read_tree(None, [override]), "run", RunConfig.model_fields["run"].annotation)  # type: ignore[type-var]


def test_how_a_value_was_spelt_is_forgotten_with_the_value() -> None:
    tree = read_tree(None, ["demo.inner.name=2024", "demo.inner={name: 7}"])
    assert tree.spelt == {("demo", "inner"): "{name: 7}"}
    with pytest.raises(UserError, match=r"demo\.inner\.name = 7: must be text"):
        section(
            tree,
            "demo",
            create_model(
                "Outer", __base__=Settings, inner=(create_model("In", __base__=Settings, name=(str, ...)), ...)
            ),
        )
