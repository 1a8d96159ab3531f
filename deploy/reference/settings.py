"""A configuration file with every setting, its default and its description, made from the settings classes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from deploy.config import RunConfig
from protocol.runtime.field_docs import descriptions

WIDTH = 110
HEAD = """\
# A run of Foray. Every setting is here with its default, commented out: take the `#` away (of the lines above it that
# end in a colon too) from what you change. Start it with `foray up THIS_FILE`; any value can be overridden there:
# `foray up THIS_FILE run.steps=20`. A path may begin with ${NAME}/, which `foray up` reads from the environment.
# Secrets never belong in here.
"""


def document(config: RunConfig | None = None) -> str:
    """YAML that reads back as `config` (default: all defaults), with each field's description above it.

    What `config` sets itself is written as it is, defaults are commented out: a default that is written down would
    count as a wish (a port that was asked for, a retriever that runs already).
    """
    given = config or RunConfig()
    lines = [HEAD]
    for name in RunConfig.model_fields:
        value = getattr(given, name)
        if isinstance(value, BaseModel):
            lines += [*_comment(descriptions(RunConfig).get(name), ""), f"{name}:", *_fields(value, "  "), ""]
    return "\n".join(lines)


def _fields(settings: BaseModel, indent: str, *, commented: bool = False) -> Iterator[str]:
    plain = settings.model_dump(mode="json")
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        off = commented or name not in settings.model_fields_set
        mark = "#" if off else ""
        yield from _comment(descriptions(type(settings)).get(name), indent)
        if isinstance(value, BaseModel):
            yield f"{mark}{indent}{name}:"
            yield from _fields(value, indent + "  ", commented=off)
        else:
            # JSON is YAML, and keeps text that looks like a number as text
            yield f"{mark}{indent}{name}: {json.dumps(plain[name], ensure_ascii=False)}"


def _comment(text: str | None, indent: str) -> list[str]:
    words = " ".join((text or "").split())
    return [f"{indent}# {line}" for line in textwrap.wrap(words, WIDTH - len(indent))]
