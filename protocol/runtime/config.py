"""Load settings: one YAML file, dotted overrides, errors that suggest the nearest valid key; and the text of fields.

Every process reads the same file and uses two sections: `run` (shared) and its own.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from protocol.errors import UserError
from protocol.runtime.settings_errors import explain, repaired, suggest, without_removed
from protocol.settings import SECTIONS, Settings

_VARIABLE = re.compile(r"^\$\{([A-Za-z_][A-Za-z0-9_]*)\}(?=/|$)")
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, OverflowError)
"""Exceptions of PyYAML for invalid text: dates such as 2026-99-99 and numbers such as 0b2 raise ValueError."""

S = TypeVar("S", bound=Settings)


class _Loader(yaml.SafeLoader):
    """Refuses two equal keys in one mapping: YAML forbids them, and PyYAML would silently use the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    why = f"the key {key.value!r} occurs twice: put its values in one place"
                    raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
                seen.add((key.tag, key.value))
        return node


def parse_yaml(text: str) -> Any:
    """Return the values in a YAML document. Raises one of NOT_YAML, also for two equal keys in one mapping."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class SettingsTree(dict[str, Any]):
    """All sections as plain values.

    spelt     text of overrides that YAML did not read as text
    recorded  Foray wrote the tree, perhaps an earlier version: removed settings at their default are left out
    """

    def __init__(
        self, tree: Mapping[str, Any], spelt: Mapping[tuple[str, ...], str], *, recorded: bool = False
    ) -> None:
        super().__init__(tree)
        self.spelt, self.recorded = dict(spelt), recorded


def read_tree(path: Path | None, overrides: Sequence[str] = ()) -> SettingsTree:
    """Return the YAML file with `a.b=c` overrides applied (values are YAML: numbers, lists, null).

    Raises UserError for a missing or malformed file, an unknown section, or an override that is not `key=value`.
    """
    tree = _load_yaml(path) if path is not None else {}
    return with_overrides(SettingsTree(tree, {}), overrides)


def with_overrides(tree: SettingsTree, overrides: Sequence[str]) -> SettingsTree:
    """Apply `a.b=c` overrides to `tree` in place and return it. Raises UserError as `read_tree` does."""
    for item in overrides:
        key, found, raw = item.partition("=")
        if not found or not key:
            raise not_an_override(item)
        try:
            value = parse_yaml(raw)
        except NOT_YAML as error:
            raise UserError(
                f"the value of override {item!r} is not valid YAML", why=" ".join(str(error).split())
            ) from None
        if isinstance(value, str) and raw.lstrip()[:1] not in "\"'|>&!":
            # a shell has removed the quotes, so ` #` begins no comment
            value = _number(raw.strip() if " #" in raw else value)
        path = tuple(key.split("."))
        _assign(tree, list(path), value, item)
        # this replaces the value at or below this key, and so its spelling
        tree.spelt = {old: text for old, text in tree.spelt.items() if old[: len(path)] != path}
        if not isinstance(value, str):
            tree.spelt[path] = raw
    for name in tree:
        if name not in SECTIONS:
            raise UserError(f"unknown section {name!r}", todo=suggest(str(name), SECTIONS))
    return tree


def override(key: str, value: object) -> str:
    """Return the override that sets `key` to a text or path as it is: YAML would read `a #b` as `a`."""
    return f"{key}={json.dumps(str(value))}"


def not_an_override(item: str) -> UserError:
    """Return the error for an argument that is neither a file nor an override."""
    return UserError(f"override {item!r} is not of the form key=value", todo="write for example learner.optim.lr=1e-4")


def section(tree: Mapping[str, Any], name: str, kind: type[S]) -> S:
    """Return section `name` as `kind`. Raises UserError that names each wrong key and the valid ones."""
    value = tree.get(name) or {}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        wrong = error
    spelt = tree.spelt if isinstance(tree, SettingsTree) else {}
    below = {path[1:]: text for path, text in spelt.items() if path[0] == name}
    try:
        if isinstance(tree, SettingsTree) and tree.recorded:
            return kind.model_validate(value := without_removed(value, wrong, name))
    except ValidationError as error:
        wrong = error
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
        tree = parse_yaml(text)
    except NOT_YAML as error:
        raise UserError(f"{path} is not valid YAML", why=" ".join(str(error).split())) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} contains a {type(tree).__name__}, not sections of settings", todo=f"use {SECTIONS}")
    return tree


def _siblings(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-4 (no dot) as text; users mean the number.
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def _assign(tree: dict[str, Any], path: list[str], value: Any, item: str) -> None:
    for name in path[:-1]:
        child = tree.get(name)
        if child is None:
            child = tree[name] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {item!r} names a key below {name!r}, which is a single value")
        tree = child
    tree[path[-1]] = value


@functools.cache
def descriptions(kind: type[BaseModel]) -> dict[str, str]:
    """Return field name -> docstring. A field redeclared in a subclass without one keeps the docstring of the base.

    Read from the source, when a page or a `--help` needs them: pydantic's `use_attribute_docstrings` reads them at
    import, which takes a quarter of a process' start-up time.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            body = _classes(inspect.getfile(base))[base.__qualname__].body
            for field, text in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


@functools.cache
def _classes(path: str) -> dict[str, ast.ClassDef]:
    """Return the top-level classes of a source file by name."""
    with open(path, encoding="utf-8") as file:
        return {node.name: node for node in ast.parse(file.read()).body if isinstance(node, ast.ClassDef)}


def expand(tree: Mapping[str, Any], environ: Mapping[str, str]) -> SettingsTree:
    """Return the tree with `${NAME}` replaced in every text that is `${NAME}` or begins with `${NAME}/`.

    Other uses of `$`, as in a prompt or a pattern, are kept. Raises UserError for an unset variable.
    """

    def walk(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return {name: walk(item, f"{where}.{name}" if where else str(name)) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item, f"{where}.{index}") for index, item in enumerate(value)]
        found = _VARIABLE.match(value) if isinstance(value, str) else None
        if found is None:
            return value
        if not environ.get(found[1]):
            raise UserError(
                f"{where} = {value}: the environment variable {found[1]} is not set",
                todo=f"export {found[1]}=DIRECTORY, or override {where}=PATH",
            )
        return environ[found[1]] + value[found.end() :]

    spelt, recorded = (tree.spelt, tree.recorded) if isinstance(tree, SettingsTree) else ({}, False)
    return SettingsTree(walk(tree, ""), spelt, recorded=recorded)
