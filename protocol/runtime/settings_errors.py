"""Explain errors in a section of the settings, and correct values whose meaning is evident."""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from protocol.redaction import SHOWN
from protocol.settings import PATTERNS

RENAMED = {"allow_unisolated": "sandbox"}
"""Former name of a settings key -> its present name."""
REMOVED = {
    "retriever.memory": "remove it; retriever.cache_mb keeps the answers of repeated searches",
    "rollout.search.http.run": "remove it; retrievers answer all runs alike",
    "retriever.online.type=bing": "its API ended on 11 August 2025; use `serper`, or `serpapi` with engine=bing",
}
"""Former setting, or its former value -> what to do instead."""
_MAY_BE_SECRET = re.compile(r"(key|token|password|secret)(_env|_variable)?$", re.IGNORECASE)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 300
_LIST = {"list_type", "tuple_type", "set_type", "frozen_set_type"}
_GROUP = {"model_attributes_type", "model_type", "dict_type", "mapping_type"}


def suggest(name: str, legal: Sequence[str]) -> str:
    """Return advice: the present name of `name`, the nearest of `legal`, or all of them."""
    if (now := RENAMED.get(name)) in legal:
        return f"it was renamed to {now!r}"
    near = difflib.get_close_matches(name, legal, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else "valid names: " + ", ".join(sorted(legal))


def explain(error: ValidationError, name: str, kind: type[BaseModel]) -> Iterator[str]:
    """Yield one message for each wrong value of section `name`."""
    for item in error.errors():
        where = ".".join([name, *(str(part) for part in item["loc"])])
        if item["type"] == "extra_forbidden":
            if where in REMOVED:
                yield f"{where} is no longer a setting: {REMOVED[where]}"
                continue
            legal = _legal_keys(kind, [str(part) for part in item["loc"][:-1]])
            yield f"unknown key {where!r}: {suggest(str(item['loc'][-1]), legal)}"
        elif item["type"] == "union_tag_not_found":
            known = ", ".join(_legal_tags(kind, [str(part) for part in item["loc"]]))
            yield f"{where} has no type: set {where}.type to one of {known}"
        elif (former := f"{where}.type={(item.get('ctx') or {}).get('tag')}") in REMOVED:
            yield f"{former} is no longer supported: {REMOVED[former]}"
        else:
            # with nested aliases, a few lines of YAML can expand to gigabytes
            yield f"{where} = {_SHORT.repr(_shown(where, item['input']))}: {_in_words(item, kind)}"


def _shown(name: str, value: Any) -> Any:
    """Return `value` without possible secrets: users put a key in place of the name of its variable."""
    if isinstance(value, Mapping):
        return {key: SHOWN if _MAY_BE_SECRET.search(str(key)) else inner for key, inner in value.items()}
    return SHOWN if isinstance(value, str) and _MAY_BE_SECRET.search(name) else value


def _legal_tags(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the valid values of `type` in the union at `path` below `kind`."""
    names = [part for part in path if not part.isdigit()]
    if not names:
        return []
    *parents, last = names
    members: list[type[BaseModel]] = [kind]
    for part in parents:
        members = [m for c in members if part in c.model_fields for m in _models(c.model_fields[part].annotation)]
    found = [m for c in members if last in c.model_fields for m in _models(c.model_fields[last].annotation)]
    return sorted({tag for m in found for tag in _tags(m)})


def _legal_keys(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the field names at `path` below `kind`; `path` selects members of a union by their tag."""
    candidates: list[type[BaseModel]] = [kind]
    for part in path:
        below = [m for c in candidates if part in c.model_fields for m in _models(c.model_fields[part].annotation)]
        # in the error path of a union, the tag of the chosen member follows the field
        candidates = below or [c for c in candidates if part in _tags(c)] or candidates
    return sorted({field for c in candidates for field in c.model_fields})


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) for m in _models(arg)]


def _tags(kind: type[BaseModel]) -> tuple[str, ...]:
    field = kind.model_fields.get("type")
    return tuple(getattr(field.annotation, "__args__", ())) if field else ()


def repaired(
    value: Any, error: ValidationError, kind: type[BaseModel], spelt: Mapping[tuple[str, ...], str]
) -> Any | None:
    """Return the value that the user evidently meant, or None.

    Where a text or a path is expected and YAML read another type (`query: ` is a mapping, 2024 a number), this is the
    override's text (`spelt`, by path in the section). The bare name of a type becomes its settings: `[wandb]` means
    `[{type: wandb}]`.
    """
    meant, changed = copy.deepcopy(value), False
    for item in error.errors():
        place = _place(meant, item["loc"])
        if place is None:
            continue
        holder, key, path = place
        # a path in brackets is a mistake, and null is not text; YAML reads the text `query: ` as a mapping
        given = holder[key]
        text = item["type"] == "string_type" and given is not None
        text |= item["type"] == "path_type" and isinstance(given, bool | int | float | date)
        if text and path in spelt:
            holder[key], changed = spelt[path], True
        elif item["type"] in _GROUP and holder[key] in _legal_tags(kind, [str(part) for part in item["loc"]]):
            holder[key], changed = {"type": holder[key]}, True
    return meant if changed else None


def _place(value: Any, loc: Sequence[int | str]) -> tuple[Any, int | str, tuple[str, ...]] | None:
    """Return (container, key in it, path from `value`) of an error, whose location also names the tags of unions."""
    found: tuple[Any, int | str, tuple[str, ...]] | None = None
    path: tuple[str, ...] = ()
    for part in loc:
        inside = isinstance(value, Mapping) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            path = (*path, str(part))
            found, value = (value, part, path), value[part]
        elif not (isinstance(value, Mapping) and value.get("type") == part):
            return None
    return found


def _in_words(item: ErrorDetails, kind: type[BaseModel]) -> str:
    """Return pydantic's message, in terms of YAML instead of Python where they differ."""
    name, context = item["type"], item.get("ctx") or {}
    tags = _legal_tags(kind, [str(part) for part in item["loc"]])
    if name in _LIST:
        return "must be a list, in brackets: [a, b]"
    if name in _GROUP:
        return "must be a group of settings: {name: value}" + (f", type = {' or '.join(tags)}" if tags else "")
    if name == "union_tag_invalid":
        wrong = str(context["tag"])
        return f"unknown type {wrong!r}: {suggest(wrong, tags)}" if tags else item["msg"]
    if name == "string_type":
        return "must be text; put it in quotes"
    if name == "path_type":
        return "must be a path; put it in quotes"
    if name.startswith("date_"):
        return "must be a date such as 2026-01-31"
    if name in ("bool_type", "bool_parsing"):
        return "must be true or false"
    if name == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        return PATTERNS.get(pattern, f"does not match the pattern {pattern}")
    return item["msg"]
