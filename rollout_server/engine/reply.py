"""One answer of /generate, or one chunk of a streamed one, as tokens: pure, and suspicious.

Nothing that an engine says is believed before it is checked: an id beyond the vocabulary, a NaN or a version span
with a gap would be trained on. Facts of the API: SGLang 0.5.21 to 0.5.23.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.versions import PolicyVersion
from rollout_server.engine.base import EngineError

MAX_LOGPROB = 0.9e-3
"""A log-prob is at most 0; rounding in the engine's softmax may lift it by a little. Less than the 1e-3 that a message
takes, which is more than 1e-3 as float32."""
MIN_LOGPROB = -1e38
"""They travel as float32, whose least number is -3.4e38."""
MAX_VOCAB = 1 << 31
"""Ids travel as int32."""

Spans = tuple[tuple[PolicyVersion, int, int], ...]
"""(version, start, end) over the tokens of one request, without gaps."""


@dataclass(frozen=True)
class Chunk:
    """What a chunk adds to the `have` tokens before it.

    ids, logprobs  [n] the new ones
    label          the engine's weight version when it sent the chunk
    spans          the versions of all have + n tokens; None where the chunk does not say
    finish         SGLang's finish_reason; None: more is to come
    """

    ids: list[int]
    logprobs: list[float]
    label: str
    spans: Spans | None
    finish: dict[str, Any] | None


def read_chunk(reply: Any, have: Sequence[int]) -> Chunk:
    """The chunk in a decoded JSON object; raises ValueError (or its like) for whatever does not add up.

    A chunk holds all tokens of the request so far or (SGLang's --incremental-streaming-output) only the new ones;
    `completion_tokens` counts all of them either way.
    """
    meta = reply["meta_info"]
    finish = meta["finish_reason"]
    if finish is not None and finish["type"] not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {str(finish['type'])[:40]!r}")
    given, pairs = reply.get("output_ids"), meta.get("output_token_logprobs")
    total = meta.get("completion_tokens")
    if total is None and finish is not None and finish["type"] == "abort" and (not pairs or given[: len(have)] != have):
        given, pairs, total = [], [], len(have)  # aborted while it waited: SGLang leaves most fields out
    if given is None or pairs is None:
        raise ValueError("no token ids, or no log-probs")
    total = len(given) if total is None else total
    start = _first_new(given, total, have)
    ids, sampled = given[start:], pairs[start:]
    logprobs = [pair[0] for pair in sampled]
    if [pair[1] for pair in sampled] != ids:
        raise ValueError(f"{len(ids)} ids, {len(sampled)} log-probs, or log-probs of other ids")
    label = str(meta["weight_version"])
    spans = meta.get("weight_versions")
    return Chunk(ids, logprobs, label, _spans(spans, total) if spans else None, finish)


def _first_new(given: list[Any], total: int, have: Sequence[int]) -> int:
    """Index of the first new token in a chunk. Raises ValueError when the chunk does not follow the ones before."""
    known = len(have)
    if len(given) == total:
        if given[:known] != have:
            raise ValueError(f"a chunk of {total} tokens contradicts the {known} before it")
        return known
    if len(given) == total - known:
        return 0
    raise ValueError(f"a chunk of {len(given)} tokens after {known}, {total} in all")


def check_tokens(chunk: Chunk, room: int, vocab_size: int | None) -> None:
    """Raises ValueError for numbers that cannot be. `room`: tokens that the request may still bring."""
    ids, logprobs = chunk.ids, chunk.logprobs
    if not ids:
        return
    if len(ids) > room:
        raise ValueError(f"{len(ids)} more tokens where {room} were allowed")
    if set(map(type, ids)) != {int}:
        raise ValueError("a token id is not an integer")
    if min(ids) < 0 or max(ids) >= (MAX_VOCAB if vocab_size is None else vocab_size):
        raise ValueError(f"a token id is outside the vocabulary of {vocab_size}")
    if not set(map(type, logprobs)) <= {float, int}:
        raise ValueError("a log-prob is not a number")
    # a sum is finite only where every one is; max says nothing of a NaN that is not the first
    if not math.isfinite(sum(logprobs)) or max(logprobs) > MAX_LOGPROB or min(logprobs) < MIN_LOGPROB:
        raise ValueError("a log-prob is not finite as float32, or above zero")


def _spans(given: Any, total: int) -> Spans:
    """Versions that cover [0, total); raises ValueError for a gap. A version with a foreign label counts as (0, 0)."""
    spans = []
    position = 0
    for item in given:
        start, end = int(item["start"]), int(item["end"])
        if start == end:
            continue
        if start != position or end < start:
            raise ValueError(f"version spans leave a gap or overlap at token {position}")
        spans.append((version_of(str(item["version"])), start, end))
        position = end
    if position != total:
        raise ValueError(f"version spans end at {position} of {total} tokens")
    return tuple(spans)


def version_of(label: str) -> PolicyVersion:
    """The policy version with this label; (0, 0) for a foreign one."""
    return PolicyVersion.parse(label) or PolicyVersion(0, 0)


def error_in_stream(reply: Any, engine: str) -> EngineError | None:
    """The error that SGLang sends as an event, since a stream's status is 200 before anything is known."""
    if not isinstance(reply, dict) or not isinstance(reply.get("error"), dict):
        return None
    error = reply["error"]
    cause = cause_of_status(error.get("code") if isinstance(error.get("code"), int) else 500)
    return EngineError(cause, engine, str(error.get("message", ""))[:500])


def cause_of_status(status: int) -> str:
    """The cause that an HTTP status of 400 or more stands for."""
    if status in (400, 413, 422):
        return "refused"
    return "http_500" if status >= 500 or status == 429 else "denied"
