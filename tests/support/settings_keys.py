"""The dotted keys of every setting that a run's YAML may have, members of unions included."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from deploy.config import RunConfig


@cache
def every_key() -> frozenset[str]:
    """Return the dotted keys of RunConfig; those of a list's items are without an index."""
    return frozenset(_walk(RunConfig, ""))


def _walk(kind: Any, path: str) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            where = f"{path}.{name}" if path else name
            yield where
            yield from _walk(field.annotation, where)
    for part in get_args(kind):
        yield from _walk(part, path)
