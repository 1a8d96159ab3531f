"""Generate a configuration file with every setting, its default and its description, from the settings classes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from deploy.config import RunConfig
from protocol.runtime.config import descriptions

WIDTH = 110
HEAD = """\
# A Foray run. Every setting is listed with its default, commented out. To change one, remove its `#`, and the `#` of
# the lines above it that end in a colon. Start the run with `foray up THIS_FILE`; override values there, for example
# `foray up THIS_FILE run.steps=20`. A path may begin with ${NAME}/, an environment variable that `foray up` reads.
# Do not put secrets into this file.
"""


def document(config: RunConfig | None = None) -> str:
    """Return YAML that reads back as `config` (default: all defaults), with each field's description above it.

    Values that `config` sets are written, defaults are commented out: a written default would count as set by the user
    (a requested port, an existing retriever).
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
            # JSON is valid YAML, and quotes text that looks like a number
            yield f"{mark}{indent}{name}: {json.dumps(plain[name], ensure_ascii=False)}"


def _comment(text: str | None, indent: str) -> list[str]:
    words = " ".join((text or "").split())
    return [f"{indent}# {line}" for line in textwrap.wrap(words, WIDTH - len(indent))]
