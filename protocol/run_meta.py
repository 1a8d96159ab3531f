"""What all processes of a run must agree on. The learner writes it to `Keys.meta` at every start; others compare.

Processes with different tokenizers would train on other words than the policy wrote, and different major versions of
the schema cannot read each other: both are refused. A different minor version is a rolling upgrade and is accepted,
unless this process sends what the learner would misread (`needs`).

A run id is a name that the user chose, and two runs may share it. The lineage id is random and identifies the run. It
is stored in the run directory (`LINEAGE_FILE`), in each checkpoint and in `Keys.meta`. Pure.
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
"""Name of its field in `Keys.meta` and in the manifest of a checkpoint."""
_LINEAGE_ID = re.compile(r"[0-9a-f]{32}")
SEQUENCES = (1, 7)
"""First schema whose learner trains a trajectory of several sequences (`Trajectory.sequences`) as such."""
_OWN = ("schema", "tokenizer", LINEAGE_FIELD)


def tokenizer_digest(tokenizer_json: bytes) -> str:
    """Return the sha256 of a tokenizer.json, independent of spacing and key order; "" if it is not JSON."""
    try:
        spec = json.loads(tokenizer_json)
    except (ValueError, RecursionError):
        return ""
    return hashlib.sha256(json.dumps(spec, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def lineage_id_in(text: str) -> str:
    """Return `text` if it is a lineage id (32 hex digits), else ""."""
    text = text.strip()
    return text if _LINEAGE_ID.fullmatch(text) else ""


@dataclass(frozen=True)
class RunMeta:
    """The hash `Keys.meta`.

    schema     (major, minor) of the messages that the learner writes
    tokenizer  `tokenizer_digest` of its run.model, "" without a tokenizer
    facts      other values, for display and for comparison by name: group_size, max_lag, host, dir, ...
    lineage_id identifies the run; "" if an older Foray wrote it
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
    """Decode the hash, the inverse of `RunMeta.fields`. None if it is empty: no learner, or an older one, has run."""
    text = text_of(raw)
    major, _, minor = text.get("schema", "").partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(major) + len(minor) < 20):
        return None
    facts = {name: value for name, value in text.items() if name not in _OWN}
    return RunMeta((int(major), int(minor)), text.get("tokenizer", ""), facts, lineage_id_of(raw))


def text_of(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """Decode the hash to text; bytes that are not UTF-8 are replaced."""
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in raw.items()}


def lineage_id_of(raw: Mapping[bytes, bytes]) -> str:
    """Return the lineage id in the hash, "" if there is none. It is written with the first lease, before the rest."""
    return lineage_id_in(raw.get(LINEAGE_FIELD.encode(), b"").decode("ascii", "replace"))


def incompatibility(
    theirs: RunMeta, *, run: str, tokenizer: str, needs: tuple[int, int] = (SCHEMA_MAJOR, 0)
) -> UserError | None:
    """Return the error if a process with `tokenizer` cannot join a run whose learner wrote `theirs`, else None.

    needs  oldest schema of a learner that can train what this process sends
    """
    ours = (SCHEMA_MAJOR, SCHEMA_MINOR)
    if theirs.schema[0] != ours[0]:
        newer = "this process" if theirs.schema > ours else "the learner"
        return UserError(
            f"the learner of run {run} writes schema {_dotted(theirs.schema)}, this process reads {_dotted(ours)}",
            why="messages of another major version cannot be read",
            todo=f"upgrade {newer}: all processes of a run need the same major version",
        )
    if theirs.schema < needs:
        return UserError(
            f"the learner of run {run} reads schema {_dotted(theirs.schema)}, this process needs {_dotted(needs)}",
            why="with rollout.agent a trajectory may have several sequences, which an older learner would train as one",
            todo="upgrade the learner, or remove rollout.agent",
        )
    if theirs.tokenizer and tokenizer and theirs.tokenizer != tokenizer:
        return UserError(
            f"the learner of run {run} has another tokenizer: {theirs.tokenizer[:16]}, not {tokenizer[:16]}",
            why="the same token ids would mean other words (shown: first 16 digits of the sha256 of tokenizer.json)",
            todo="set the same run.model for both",
        )
    return None


def another_run_error(
    raw: Mapping[bytes, bytes], *, run: str, redis: str, ours: str, more: str = "", todo: str
) -> UserError:
    """Return the error for a process that found another run under its run id; `raw` is the hash of that run.

    redis  URL of that Redis, without passwords
    ours   the run of this process, for the message
    more   further facts about the other run, for the message
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
