"""What all processes of a run must agree on. The learner writes it to `Keys.meta` at every start; others compare.

Two processes with different tokenizers would teach the policy other words than it wrote, and two majors of the schema
cannot read each other: both are refused. A different minor is a rolling upgrade and goes on. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.codec import SCHEMA_MAJOR, SCHEMA_MINOR
from protocol.errors import UserError

_OWN = ("schema", "tokenizer")


def tokenizer_digest(tokenizer_json: bytes) -> str:
    """sha256 of a model directory's tokenizer.json, whatever its spacing and order of keys; "" when it is no JSON."""
    try:
        spec = json.loads(tokenizer_json)
    except (ValueError, RecursionError):
        return ""
    return hashlib.sha256(json.dumps(spec, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


@dataclass(frozen=True)
class RunMeta:
    """The hash `Keys.meta`.

    schema     (major, minor) of the messages that the learner writes
    tokenizer  `tokenizer_digest` of its run.model, "" where it has none
    facts      anything else, for people and for comparison by name: group_size, max_lag, temperature, ...
    """

    schema: tuple[int, int] = (SCHEMA_MAJOR, SCHEMA_MINOR)
    tokenizer: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, str]:
        """What HSET takes."""
        return dict(self.facts) | {"schema": f"{self.schema[0]}.{self.schema[1]}", "tokenizer": self.tokenizer}


def parse(raw: Mapping[bytes, bytes]) -> RunMeta | None:
    """Inverse of `RunMeta.fields`; None where there is none yet (or a learner that knew nothing of it wrote none)."""
    text = {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in raw.items()}
    major, _, minor = text.get("schema", "").partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(major) + len(minor) < 20):
        return None
    facts = {name: value for name, value in text.items() if name not in _OWN}
    return RunMeta((int(major), int(minor)), text.get("tokenizer", ""), facts)


def refusal(theirs: RunMeta, *, run: str, tokenizer: str) -> UserError | None:
    """Why a process with this schema and `tokenizer` must not work in a run whose learner says `theirs`."""
    ours = (SCHEMA_MAJOR, SCHEMA_MINOR)
    if theirs.schema[0] != ours[0]:
        newer = "this process" if theirs.schema > ours else "the learner"
        return UserError(
            f"the learner of run {run} writes schema {_dotted(theirs.schema)}, this process knows {_dotted(ours)}",
            why="messages of another major cannot be read",
            todo=f"upgrade {newer}: all processes of a run need the same major",
        )
    if theirs.tokenizer and tokenizer and theirs.tokenizer != tokenizer:
        return UserError(
            f"the learner of run {run} has another tokenizer: {theirs.tokenizer[:16]}, ours is {tokenizer[:16]}",
            why="the same ids would mean other words (sha256 of tokenizer.json in run.model, its first 16 digits)",
            todo="give both the same run.model",
        )
    return None


def _dotted(schema: tuple[int, int]) -> str:
    return f"{schema[0]}.{schema[1]}"
