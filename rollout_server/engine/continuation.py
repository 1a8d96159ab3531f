"""Assemble one turn from one or more requests: tokens so far, the remaining request, and the end of the turn. Pure.

An engine ends a turn at a stop string or an end-of-sequence token, but it sees only the tokens that it sampled. In a
continued turn it misses a stop string that started in the tokens of the previous engine; and the last chunk of an
otherwise complete answer may be lost. In those two cases the end is detected here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protocol.messages import VersionSpan
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion, GenerateRequest
from rollout_server.engine.decoding import ReceivedTokens


@dataclass(frozen=True)
class StopChecker:
    """Finds the end of a turn in its tokens. `decode` converts ids to text; `eos_ids` are tokens that end a turn."""

    decode: Callable[[Sequence[int]], str]
    eos_ids: frozenset[int] = frozenset()

    def find(self, ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str | int] | None:
        """Return (number of tokens up to and including the end, the stop string or token id); None: no end yet."""
        over = next((k for k, i in enumerate(ids, 1) if i in self.eos_ids), 0)
        ids = ids[:over] if over else ids
        text = self.decode(ids)
        if any(stop in text for stop in stops):
            for k in range(1, len(ids) + 1):
                text = self.decode(ids[:k])
                for stop in stops:
                    if stop in text:
                        return k, stop
        return (over, ids[over - 1]) if over else None


class TurnAssembler:
    """The tokens of a turn while they arrive. `stop_checker` None: rely on the engines to detect the end."""

    def __init__(self, request: GenerateRequest, stop_checker: StopChecker | None = None) -> None:
        self._request, self._stop_checker = request, stop_checker
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[tuple[PolicyVersion, int, int]] = []
        self.pieces = 0
        self._engine = ""
        self._finish: tuple[str, str | int | None] | None = None

    def add(self, received: ReceivedTokens) -> int:
        """Add the tokens of a request. Return how many were dropped because their version is unknown."""
        spans = received.spans()
        sure = spans[-1][2] if spans else 0
        before = len(self.ids)
        self.ids += received.ids[:sure]
        self._logprobs += received.logprobs[:sure]
        for version, start, end in spans:
            self._append_span(version, before + start, before + end)
        if sure:
            self.pieces += 1
            self._engine = received.engine
        whole = sure == len(received.ids)
        self._finish = (received.finish_reason, received.matched) if whole and received.finish_reason else None
        return len(received.ids) - sure

    def remaining_request(self) -> GenerateRequest:
        """Return the request that continues the turn after the tokens received so far."""
        if not self.ids:
            return self._request
        left = self._request.max_new_tokens - len(self.ids)
        return replace(self._request, ids=[*self._request.ids, *self.ids], max_new_tokens=left)

    def ends_within(self, more: Sequence[int]) -> bool:
        """Return whether the turn ends within `more`, the tokens received so far from the continuing request."""
        return (
            self._stop_checker is not None
            and self._stop_checker.find([*self.ids, *more], self._request.stop) is not None
        )

    def completion(self) -> Completion | None:
        """Return the completed turn, or None if it is not complete."""
        count, finish = len(self.ids), self._finish
        if self._stop_checker is not None and count and (finish is None or self.pieces > 1):
            found = self._stop_checker.find(self.ids, self._request.stop)
            if found is not None:
                count, finish = found[0], ("stop", found[1])
        if finish is None and count and count >= self._request.max_new_tokens:
            finish = ("length", None)
        if finish is None:
            return None
        spans = tuple(
            VersionSpan(epoch=version.epoch, step=version.step, start=start, end=min(end, count))
            for version, start, end in self._spans
            if start < count
        )
        return Completion(
            self.ids[:count], self._logprobs[:count], spans, finish[0], finish[1], self._engine, max(1, self.pieces)
        )

    def _append_span(self, version: PolicyVersion, start: int, end: int) -> None:
        """Append a span, or extend the last one if it has the same version."""
        if self._spans and self._spans[-1][0] == version:
            start = self._spans.pop()[1]
        self._spans.append((version, start, end))
