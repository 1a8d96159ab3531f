"""A configuration file with every setting, its default and its description, made from the settings classes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from deploy.config import RunConfig

WIDTH = 110
HEAD = """\
# A run of Foray: every setting with its default. What you do not change, you may delete.
# Start it with `foray up THIS_FILE`; any value can be overridden there: `foray up THIS_FILE run.steps=20`.
# A path may begin with ${NAME}/, which `foray up` reads from the environment. Secrets never belong in here.
"""


def document(config: RunConfig | None = None) -> str:
    """YAML that reads back as `config` (default: all defaults), with each field's description above it."""
    given = config or RunConfig()
    lines = [HEAD]
    for name, field in RunConfig.model_fields.items():
        value = getattr(given, name)
        if isinstance(value, BaseModel):
            lines += [*_comment(field.description, ""), f"{name}:", *_fields(value, "  "), ""]
    return "\n".join(lines)


def _fields(settings: BaseModel, indent: str) -> Iterator[str]:
    plain = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        yield from _comment(field.description, indent)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _fields(value, indent + "  ")
        else:
            # JSON is YAML, and keeps text that looks like a number as text
            yield f"{indent}{name}: {_scalar(plain[name])}"


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _comment(text: str | None, indent: str) -> list[str]:
    words = " ".join((text or "").split())
    return [f"{indent}# {line}" for line in textwrap.wrap(words, WIDTH - len(indent))]
