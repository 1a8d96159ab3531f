"""Decode the server-sent events of /generate into the tokens of a `ReceivedTokens`. Pure.

SGLang's chunks are cumulative: each holds all tokens so far, so decoding every chunk has a quadratic cost. Chunks that
only add tokens are therefore kept as bytes; at the end of the stream, or at `flush`, the last one is decoded and
checked, and it includes all earlier ones.

Everything that an engine sends is validated before use: an id beyond the vocabulary, a NaN or a gap between version
spans would otherwise be trained on. API behaviour: SGLang 0.5.21 to 0.5.23.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.versions import PolicyVersion
from rollout_server.engine.base import EngineError

MAX_LOGPROB = 0.9e-3
"""Upper bound of a log-prob: it is at most 0, but rounding in the engine's softmax may exceed that slightly. Below the
bound of 1e-3 in messages, which as a float32 is more than 1e-3."""
MIN_LOGPROB = -1e38
"""Lower bound of a log-prob: they are stored as float32, whose minimum is -3.4e38."""
MAX_VOCAB = 1 << 31
"""Upper bound of a token id: they are stored as int32."""

Spans = tuple[tuple[PolicyVersion, int, int], ...]
"""(version, start, end) for the tokens of one request, without gaps."""

ABORT_CAUSE = {400: "refused", 500: "http_500"}
"""Status code in the finish reason of an abort -> cause. Other aborts, 503 (queue full) included: `aborted`."""
LONGEST_LINE = 8 << 20
"""Maximum bytes of a line. A cumulative chunk of 32768 tokens with log-probs has less than 2 MB."""
_FIELDS = (b"data:", b":", b"event:", b"id:", b"retry:")
_GOES_ON = re.compile(rb'"finish_reason": ?null')
_TOTAL = re.compile(rb'"completion_tokens": ?(\d{1,9})')
_DONE_WELL = re.compile(rb'"finish_reason": ?\{"type": ?"(stop|length)"')


@dataclass(frozen=True)
class Chunk:
    """What a chunk adds to the `have` tokens before it.

    ids, logprobs  [n] the new tokens
    label          the engine's weight version when it sent the chunk
    spans          versions of all have + n tokens; None if the chunk has none
    finish         SGLang's finish_reason; None: more chunks follow
    """

    ids: list[int]
    logprobs: list[float]
    label: str
    spans: Spans | None
    finish: dict[str, Any] | None


def read_chunk(reply: Any, have: Sequence[int]) -> Chunk:
    """Return the chunk in a decoded JSON object. Raises ValueError, KeyError or TypeError for an inconsistent one.

    A chunk holds all tokens of the request so far, or only the new ones (SGLang's --incremental-streaming-output);
    `completion_tokens` always counts all of them.
    """
    meta = reply["meta_info"]
    finish = meta["finish_reason"]
    if finish is not None and finish["type"] not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {str(finish['type'])[:40]!r}")
    given, pairs = reply.get("output_ids"), meta.get("output_token_logprobs")
    total = meta.get("completion_tokens")
    if total is None and finish is not None and finish["type"] == "abort" and (not pairs or given[: len(have)] != have):
        given, pairs, total = [], [], len(have)  # aborted while queued: SGLang omits most fields
    if given is None or pairs is None:
        raise ValueError("token ids or log-probs are missing")
    total = len(given) if total is None else total
    start = _first_new(given, total, have)
    ids, sampled = given[start:], pairs[start:]
    logprobs = [pair[0] for pair in sampled]
    if [pair[1] for pair in sampled] != ids:
        raise ValueError(f"{len(ids)} ids do not match {len(sampled)} log-probs")
    label = str(meta["weight_version"])
    spans = meta.get("weight_versions")
    return Chunk(ids, logprobs, label, _spans(spans, total) if spans else None, finish)


def _first_new(given: list[Any], total: int, have: Sequence[int]) -> int:
    """Return the index of the first new token in a chunk. Raises ValueError if it does not follow the last chunk."""
    known = len(have)
    if len(given) == total:
        if given[:known] != have:
            raise ValueError(f"a chunk of {total} tokens contradicts the {known} tokens before it")
        return known
    if len(given) == total - known:
        return 0
    raise ValueError(f"a chunk of {len(given)} tokens after {known} tokens, but {total} in total")


def check_tokens(chunk: Chunk, remaining: int, vocab_size: int | None) -> None:
    """Raise ValueError for invalid ids or log-probs. `remaining`: maximum number of tokens still allowed."""
    ids, logprobs = chunk.ids, chunk.logprobs
    if not ids:
        return
    if len(ids) > remaining:
        raise ValueError(f"{len(ids)} more tokens, but at most {remaining} were requested")
    if set(map(type, ids)) != {int}:
        raise ValueError("a token id is not an integer")
    if min(ids) < 0 or max(ids) >= (MAX_VOCAB if vocab_size is None else vocab_size):
        raise ValueError(f"a token id is outside the vocabulary of {vocab_size}")
    if not set(map(type, logprobs)) <= {float, int}:
        raise ValueError("a log-prob is not a number")
    # a sum is finite only if every term is; max() ignores a NaN that is not the first element
    if not math.isfinite(sum(logprobs)) or max(logprobs) > MAX_LOGPROB or min(logprobs) < MIN_LOGPROB:
        raise ValueError("a log-prob is not finite as float32, or above zero")


def _spans(given: Any, total: int) -> Spans:
    """Return the versions that cover [0, total). Raises ValueError for a gap. An unknown label counts as (0, 0)."""
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
    """Return the policy version with this label; (0, 0) for a label in another format."""
    return PolicyVersion.parse(label) or PolicyVersion(0, 0)


def error_in_stream(reply: Any, engine: str) -> EngineError | None:
    """Return the error that SGLang sent as an event: the HTTP status of a stream is 200 before an error is known."""
    if not isinstance(reply, dict) or not isinstance(reply.get("error"), dict):
        return None
    error = reply["error"]
    cause = cause_of_status(error.get("code") if isinstance(error.get("code"), int) else 500)
    return EngineError(cause, engine, str(error.get("message", ""))[:500])


def cause_of_status(status: int) -> str:
    """Return the cause for an HTTP status of 400 or more."""
    if status in (400, 413, 422):
        return "refused"
    return "http_500" if status >= 500 or status == 429 else "denied"


class ReceivedTokens:
    """Tokens of one request to `engine`, kept however it ends.

    If the engine reports the version of each token (`weight_versions`: the CPU engine in every chunk, SGLang in
    the last one), that is used. A stream that breaks earlier has only the label of each chunk. A chunk with a new label
    may hold tokens of both versions: its tokens and all later ones are dropped and counted, since a token with a wrong
    version would be trained with a wrong ratio.

    limit       maximum number of tokens requested
    vocab_size  ids must be below it; None: unknown
    label       version that the engine had when the request was sent; "" unknown
    fixed       version of every token, whatever the engine reports: it knows its base model, not the adapter's step

    ids [n], logprobs [n]; finish_reason and matched as in Completion, "" while more may come.
    """

    def __init__(
        self,
        engine: str,
        limit: int,
        *,
        vocab_size: int | None = None,
        label: str = "",
        fixed: PolicyVersion | None = None,
    ) -> None:
        self.engine, self.limit, self._vocab_size = engine, limit, vocab_size
        self._fixed = fixed
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason = ""
        self.matched: str | int | None = None
        self.chunks = 0
        self._expected = label
        """Label of all chunks so far; initially `label`."""
        self._sure = 0
        """Number of tokens before the first chunk with a different label."""
        self._changed = False
        self._labels: set[str] = set()
        self._spans: Spans = ()

    def take(self, reply: Any) -> None:
        """Add a decoded answer or chunk. Raises EngineError: bad_output, aborted (tokens kept), refused, http_500."""
        error = error_in_stream(reply, self.engine)
        if error is not None:
            raise error
        try:
            chunk = read_chunk(reply, self.ids)
            check_tokens(chunk, self.limit - len(self.ids), self._vocab_size)
            if chunk.finish is not None and chunk.finish["type"] != "abort" and not (self.ids or chunk.ids):
                raise ValueError("no tokens")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as problem:
            detail = f"{type(problem).__name__}: {str(problem)[:200]}"
            raise EngineError("bad_output", self.engine, detail) from None
        self.chunks += 1
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self._note_version(chunk.label, chunk.spans)
        if chunk.finish is not None:
            self._finish(chunk.finish)

    def _note_version(self, label: str, spans: Spans | None) -> None:
        if len(self._labels) < 2:  # more than one is all that matters, and an engine may send any number
            self._labels.add(label)
        self._expected = self._expected or label
        self._changed = self._changed or label != self._expected
        if not self._changed:
            self._sure = len(self.ids)
        if spans is not None:
            self._spans = spans

    def _finish(self, finish: dict[str, Any]) -> None:
        if finish["type"] == "abort":
            status = finish.get("status_code")
            cause = ABORT_CAUSE.get(status if isinstance(status, int) else 0, "aborted")
            raise EngineError(cause, self.engine, str(finish.get("message", ""))[:200])
        self.finish_reason = finish["type"]
        matched = finish.get("matched")
        self.matched = matched if isinstance(matched, str | int) else None

    def spans(self) -> Spans:
        """Return the known versions of the first tokens. They may cover fewer tokens than were received."""
        n = len(self.ids)
        if self._fixed is not None:
            return ((self._fixed, 0, n),) if n else ()
        if self._spans:
            return self._spans
        # an answer that ended normally with one label has that version, even if the engine table was outdated
        one = len(self._labels) == 1
        sure = n if self.finish_reason and one else self._sure
        label = next(iter(self._labels)) if one else self._expected
        return ((version_of(label), 0, sure),) if sure else ()


class SseParser:
    """Splits a byte stream into the payloads of its `data:` lines. Raises EngineError("bad_output")."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes."""
        payloads = []
        if b"\n" in data:
            *lines, rest = (bytes(self._rest) + data).split(b"\n")
            self._rest = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    payloads.append(line[5:].strip())
                elif line not in (b"", b"\r") and not line.startswith(_FIELDS):
                    raise EngineError("bad_output", self._engine, f"not a server-sent event: {line[:100]!r}")
        else:
            self._rest += data
        begun = bytes(self._rest[:6])
        if not begun.startswith(_FIELDS) and not any(field.startswith(begun) for field in (*_FIELDS, b"\r")):
            raise EngineError("bad_output", self._engine, f"not a server-sent event: {bytes(self._rest[:100])!r}")
        if len(self._rest) > LONGEST_LINE:
            raise EngineError("bad_output", self._engine, f"a line of more than {LONGEST_LINE} bytes")
        return payloads


class StreamDecoder:
    """Decodes the bytes of one answer into `received`."""

    def __init__(self, received: ReceivedTokens) -> None:
        self._received = received
        self._events = SseParser(received.engine)
        self._cumulative = False
        self._pending = b""
        self._same = re.compile(b"")
        """Finds the label of the last decoded chunk."""

    def feed(self, data: bytes) -> None:
        """Decode the events that `data` completes. Raises EngineError as `ReceivedTokens.take` does."""
        for payload in self._events.feed(data):
            if self._can_wait(payload):
                self._pending = payload
            elif payload != b"[DONE]":
                if self._holds_all(payload):
                    self._pending = b""
                self.flush()
                self._take(payload)

    def flush(self) -> None:
        """Decode the postponed chunk, if any. Raises EngineError as `ReceivedTokens.take` does."""
        pending, self._pending = self._pending, b""
        if pending:
            self._take(pending)

    def count(self) -> int:
        """Return the number of tokens so far: of a postponed chunk what it states, without decoding it."""
        stated = _TOTAL.match(self._pending, max(0, self._pending.rfind(b'"completion_tokens"')))
        return max(len(self._received.ids), int(stated[1]) if stated else 0)

    def _can_wait(self, payload: bytes) -> bool:
        """Return whether decoding can be postponed: the chunk is not the last, and its label has not changed."""
        return self._cumulative and bool(_GOES_ON.search(payload)) and bool(self._same.search(payload))

    def _holds_all(self, payload: bytes) -> bool:
        """Return whether a last chunk includes everything of the one before, versions included."""
        return self._cumulative and b'"weight_versions"' in payload and _DONE_WELL.search(payload) is not None

    def _take(self, payload: bytes) -> None:
        received = self._received
        try:
            reply = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise EngineError("bad_output", received.engine, f"not JSON: {str(error)[:200]}") from None
        known = len(received.ids)
        received.take(reply)
        # the second chunk shows whether the stream is cumulative: then it repeats the tokens of the first
        self._cumulative = bool(known) and len(reply["output_ids"]) == len(received.ids)
        label = json.dumps(reply["meta_info"]["weight_version"]).encode()
        self._same = re.compile(b'"weight_version": ?' + re.escape(label))
