"""Server-sent events of /generate, as tokens in a `Received`: pure.

SGLang's chunks hold all tokens so far, so decoding each one costs the square of the turn's length. Of a chunk that
says nothing new but more tokens only its bytes are kept, until the stream ends or somebody looks (`settle`): then the
last one is decoded and checked, and it holds what the others held.
"""

from __future__ import annotations

import json
import re

from rollout_server.engine.base import EngineError
from rollout_server.engine.received import Received

LONGEST_LINE = 8 << 20
"""Bytes. A turn of 32768 tokens with log-probs, cumulative, takes less than 2 MB."""

_FIELDS = (b"data:", b":", b"event:", b"id:", b"retry:")
_GOES_ON = re.compile(rb'"finish_reason": ?null')
_DONE_WELL = re.compile(rb'"finish_reason": ?\{"type": ?"(stop|length)"')


class Events:
    """Splits a byte stream into the payloads of its `data:` lines. Raises EngineError("bad_output")."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes."""
        payloads = []
        if b"\n" in data:
            *lines, rest = (bytes(self._rest) + data).split(b"\n")
            self._rest = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    payloads.append(line[5:].strip())
                elif line not in (b"", b"\r") and not line.startswith(_FIELDS):
                    raise EngineError("bad_output", self._engine, f"not an event: {line[:100]!r}")
        else:
            self._rest += data
        begun = bytes(self._rest[:6])
        if not begun.startswith(_FIELDS) and not any(field.startswith(begun) for field in (*_FIELDS, b"\r")):
            raise EngineError("bad_output", self._engine, f"not an event: {bytes(self._rest[:100])!r}")
        if len(self._rest) > LONGEST_LINE:
            raise EngineError("bad_output", self._engine, f"a line of more than {LONGEST_LINE} bytes")
        return payloads


class Reader:
    """Feeds `received` from the bytes of one answer."""

    def __init__(self, received: Received) -> None:
        self._received = received
        self._events = Events(received.engine)
        self._cumulative = False
        self._pending = b""
        self._same = re.compile(b"")
        """Finds the label of the last decoded chunk."""

    def feed(self, data: bytes) -> None:
        """Takes what `data` completes. Raises EngineError as `Received.take` does."""
        for payload in self._events.feed(data):
            if self._can_wait(payload):
                self._pending = payload
            elif payload != b"[DONE]":
                if self._holds_all(payload):
                    self._pending = b""
                self.settle()
                self._take(payload)

    def settle(self) -> None:
        """Decodes the chunk that was put off, if there is one. Raises EngineError as `Received.take` does."""
        pending, self._pending = self._pending, b""
        if pending:
            self._take(pending)

    def _can_wait(self, payload: bytes) -> bool:
        """Whether a chunk need not be decoded now: it is not the last, and its label is that of the one before."""
        return self._cumulative and bool(_GOES_ON.search(payload)) and bool(self._same.search(payload))

    def _holds_all(self, payload: bytes) -> bool:
        """Whether a last chunk says all that the one before said, versions included."""
        return self._cumulative and b'"weight_versions"' in payload and _DONE_WELL.search(payload) is not None

    def _take(self, payload: bytes) -> None:
        received = self._received
        try:
            reply = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise EngineError("bad_output", received.engine, f"not JSON: {str(error)[:200]}") from None
        known = len(received.ids)
        received.take(reply)
        # a second chunk tells the kinds of stream apart: it repeats the tokens of the first, or it does not
        self._cumulative = bool(known) and len(reply["output_ids"]) == len(received.ids)
        label = json.dumps(reply["meta_info"]["weight_version"]).encode()
        self._same = re.compile(b'"weight_version": ?' + re.escape(label))
