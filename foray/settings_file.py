"""Generate a configuration file: the values of a run, and the settings that matter with their meaning.

docs/configuration.md lists all settings.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from deploy.config import RunConfig
from protocol.runtime.config import descriptions

WIDTH = 110
MATTER = frozenset(
    {
        *("run.model", "run.steps", "run.group_size", "run.groups_per_step", "run.max_lag", "run.temperature"),
        *("rollout.episode.template", "rollout.episode.rewards", "rollout.episode.max_turns"),
        *("rollout.episode.max_new_tokens", "rollout.episode.max_context", "rollout.search.topk"),
        *("engine.kind.type", "launch.engines", "retriever.index_dir"),
        *("learner.questions", "learner.algorithm.type", "learner.optim.lr", "learner.batch.micro_batch_tokens"),
        "learner.eval.suites",
    }
)
"""The twenty settings that a first run of one's own may need."""
HEAD = """\
# A Foray run: values that were given, and the settings that matter most with their defaults, commented out. To change
# one, remove its `#`, and the `#` of the lines above it that end in a colon. docs/configuration.md lists all settings.
# Start the run with `foray up THIS_FILE`; override values there, for example `foray up THIS_FILE run.steps=20`. A path
# may begin with ${NAME}/, an environment variable that `foray up` reads. Do not put secrets into this file.
"""


def document(config: RunConfig | None = None) -> str:
    """Return YAML that reads back as `config` (default: all defaults), with each field's description above it.

    Values that `config` sets are written, defaults of MATTER are commented out: a written default would count as set by
    the user (a requested port, an existing retriever).
    """
    given = config or RunConfig()
    lines = [HEAD]
    for name in RunConfig.model_fields:
        value = getattr(given, name)
        if isinstance(value, BaseModel) and (fields := list(_fields(value, name, "  "))):
            lines += [*_comment(descriptions(RunConfig).get(name), ""), f"{name}:", *fields, ""]
    return "\n".join(lines)


def _fields(settings: BaseModel, path: str, indent: str, *, commented: bool = False) -> Iterator[str]:
    plain = settings.model_dump(mode="json")
    for name in type(settings).model_fields:
        value, dotted = getattr(settings, name), f"{path}.{name}"
        off = commented or name not in settings.model_fields_set
        mark, said = "#" if off else "", _comment(descriptions(type(settings)).get(name), indent)
        if isinstance(value, BaseModel):
            if below := list(_fields(value, dotted, indent + "  ", commented=off)):
                yield from (*said, f"{mark}{indent}{name}:", *below)
        elif not off or dotted in MATTER:
            # JSON is valid YAML, and quotes text that looks like a number
            yield from (*said, f"{mark}{indent}{name}: {json.dumps(plain[name], ensure_ascii=False)}")


def _comment(text: str | None, indent: str) -> list[str]:
    words = " ".join((text or "").split())
    return [f"{indent}# {line}" for line in textwrap.wrap(words, WIDTH - len(indent))]
