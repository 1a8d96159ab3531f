"""Paths of a configuration, absolute: what the launcher writes down must mean the same from any directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
M = TypeVar("M", bound=BaseModel)


def anchored(config: M) -> M:
    """`config` with every path absolute, so that it means the same from any directory.

    A path that only Foray's checkout has (`engine.kind.launcher`) stays: nodes look for it there.
    """
    values = {name: _anchored(value) for name, value in config}
    return type(config).model_construct(_fields_set=set(config.model_fields_set), **values)


def _anchored(value: Any) -> Any:
    match value:
        case BaseModel():
            return anchored(value)
        case Path():
            only_in_checkout = not value.exists() and (ROOT / value).exists()
            return value if only_in_checkout or str(value).startswith("synthetic:") else value.absolute()
        case tuple():
            return tuple(map(_anchored, value))
        case _:
            return value
