"""What all processes of a run must agree on. The learner writes it to `Keys.meta` at every start; others compare.

Two processes with different tokenizers would teach the policy other words than it wrote, and two majors of the schema
cannot read each other: both are refused. A different minor is a rolling upgrade and goes on.

A run id is a name that a person chose, and two runs may have the same. The lineage id is random and says which run it
is: it is in the run directory (`LINEAGE_FILE`), in each checkpoint and in `Keys.meta`. Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.codec import SCHEMA_MAJOR, SCHEMA_MINOR
from protocol.errors import UserError

LINEAGE_FILE = "lineage_id"
"""File in the run directory that holds the lineage id."""
LINEAGE_FIELD = "lineage_id"
"""The same in `Keys.meta` and in the manifest of a checkpoint."""
_LINEAGE_ID = re.compile(r"[0-9a-f]{32}")
_OWN = ("schema", "tokenizer", LINEAGE_FIELD)


def tokenizer_digest(tokenizer_json: bytes) -> str:
    """Return the sha256 of a tokenizer.json, independent of spacing and order of keys; "" if it is no JSON."""
    try:
        spec = json.loads(tokenizer_json)
    except (ValueError, RecursionError):
        return ""
    return hashlib.sha256(json.dumps(spec, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def lineage_id_in(text: str) -> str:
    """Return the lineage id that `text` consists of (32 hex digits), "" for anything else."""
    text = text.strip()
    return text if _LINEAGE_ID.fullmatch(text) else ""


@dataclass(frozen=True)
class RunMeta:
    """The hash `Keys.meta`.

    schema     (major, minor) of the messages that the learner writes
    tokenizer  `tokenizer_digest` of its run.model, "" where it has none
    facts      anything else, for people and for comparison by name: group_size, max_lag, host, dir, ...
    lineage_id which run it is, "" where an older Foray wrote it
    """

    schema: tuple[int, int] = (SCHEMA_MAJOR, SCHEMA_MINOR)
    tokenizer: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    lineage_id: str = ""

    def fields(self) -> dict[str, str]:
        """Return the mapping for HSET."""
        own = {"schema": _dotted(self.schema), "tokenizer": self.tokenizer}
        return dict(self.facts) | own | ({LINEAGE_FIELD: self.lineage_id} if self.lineage_id else {})


def parse_run_meta(raw: Mapping[bytes, bytes]) -> RunMeta | None:
    """Inverse of `RunMeta.fields`; None where there is none yet (or a learner that knew nothing of it wrote none)."""
    text = text_of(raw)
    major, _, minor = text.get("schema", "").partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(major) + len(minor) < 20):
        return None
    facts = {name: value for name, value in text.items() if name not in _OWN}
    return RunMeta((int(major), int(minor)), text.get("tokenizer", ""), facts, lineage_id_of(raw))


def text_of(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """Decode the hash; bytes that are no UTF-8 are replaced."""
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in raw.items()}


def lineage_id_of(raw: Mapping[bytes, bytes]) -> str:
    """Return the lineage id in the hash, "" if there is none. It is written with the first lease, before the rest."""
    return lineage_id_in(raw.get(LINEAGE_FIELD.encode(), b"").decode("ascii", "replace"))


def incompatibility(theirs: RunMeta, *, run: str, tokenizer: str) -> UserError | None:
    """Return why a process with this schema and `tokenizer` must not work in a run whose learner says `theirs`."""
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


def another_run_error(
    raw: Mapping[bytes, bytes], *, run: str, redis: str, ours: str, more: str = "", todo: str
) -> UserError:
    """Return the error of a process that found another run under its run id: `raw` is that run's hash.

    redis  where that is, without passwords
    ours   whom this process works for, in words
    more   what else is known of the other run, in words
    """
    facts = text_of(raw)
    named = (("host", "host"), ("run.dir", "dir"), ("model", "model"), ("questions", "questions"), ("seed", "seed"))
    known = [f"{label} {facts[name][:200]}" for label, name in named if facts.get(name)]
    which = ", ".join([f"lineage {lineage_id_of(raw)[:8] or 'unknown'}", *known, *([more] if more else [])])
    return UserError(
        f"the Redis at {redis} already holds another run named {run!r} ({which})",
        why=f"this process belongs to {ours}: the two would share tasks, trajectories and weights",
        todo=todo,
    )


def _dotted(schema: tuple[int, int]) -> str:
    return f"{schema[0]}.{schema[1]}"
