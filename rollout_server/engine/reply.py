"""What an engine answered to /generate, as a Completion: pure, and suspicious.

Nothing that an engine says is believed before it is checked: an id beyond the vocabulary, a NaN or a version span
with a gap would be trained on. Facts of the API: `research` notes of the design, SGLang 0.5.21 to 0.5.23.
"""

from __future__ import annotations

import math
from typing import Any

from protocol.messages import VersionSpan
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion, EngineError

MAX_LOGPROB = 1e-3
"""A log-prob is at most 0; rounding in the engine's softmax may lift it by a little."""


def parse_completion(reply: Any, *, engine: str, max_new_tokens: int, vocab_size: int | None = None) -> Completion:
    """The completion in the JSON of `POST /generate`; raises EngineError("bad_output") or ("aborted").

    An engine that aborts a request (it drains, its queue is full) answers 200 with what it has: no completion.
    """
    try:
        meta = reply["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort":
            raise EngineError("aborted", engine, str(finish.get("message", ""))[:200])
        ids = [int(i) for i in reply["output_ids"]]
        pairs = meta["output_token_logprobs"]
        logprobs = [float(pair[0]) for pair in pairs]
        sampled = [int(pair[1]) for pair in pairs]
        spans = _spans(meta, len(ids))
        matched = finish.get("matched")
        finish_reason = str(finish["type"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError("bad_output", engine, f"{type(error).__name__}: {str(error)[:200]}") from None
    fault = _fault(ids, sampled, logprobs, max_new_tokens, vocab_size)
    if fault or finish_reason not in ("stop", "length"):
        raise EngineError("bad_output", engine, fault or f"finish reason {finish_reason[:40]!r}")
    return Completion(ids, logprobs, spans, finish_reason, matched if isinstance(matched, str | int) else None, engine)


def _fault(
    ids: list[int], sampled: list[int], logprobs: list[float], max_new_tokens: int, vocab_size: int | None
) -> str:
    """What is wrong with the numbers, "" when nothing is."""
    if not ids:
        return "no tokens"
    if ids != sampled:
        return f"{len(ids)} ids, {len(sampled)} log-probs, or log-probs of other ids"
    if len(ids) > max_new_tokens:
        return f"{len(ids)} tokens where {max_new_tokens} were allowed"
    if not all(math.isfinite(x) and x <= MAX_LOGPROB for x in logprobs):
        return "a log-prob is not finite or above zero"
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        return f"a token id is outside the vocabulary of {vocab_size}"
    return ""


def _spans(meta: dict[str, Any], n: int) -> tuple[VersionSpan, ...]:
    """Versions that cover [0, n); raises ValueError for a gap. A version with a foreign label counts as (0, 0)."""
    given = meta.get("weight_versions")
    if not given:
        given = [{"version": meta["weight_version"], "start": 0, "end": n}] if n else []
    spans = []
    position = 0
    for item in given:
        start, end = int(item["start"]), int(item["end"])
        if start == end:
            continue
        if start != position or end < start:
            raise ValueError(f"version spans leave a gap or overlap at token {position}")
        epoch, step = PolicyVersion.parse(str(item["version"])) or PolicyVersion(0, 0)
        spans.append(VersionSpan(epoch=epoch, step=step, start=start, end=end))
        position = end
    if position != n:
        raise ValueError(f"version spans end at {position} of {n} tokens")
    return tuple(spans)
