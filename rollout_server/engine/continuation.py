"""Assemble one turn from one or more requests: tokens so far, the remaining request, and the end of the turn. Pure.

An engine ends a turn at a stop string or an end-of-sequence token, but it sees only the tokens that it sampled. In a
continued turn it misses a stop string that started in the tokens of the previous engine; and the last chunk of an
otherwise complete answer may be lost. In those two cases the end is detected here, at a cost of O(tokens of the turn).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from protocol.messages import VersionSpan
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion, GenerateRequest
from rollout_server.engine.decoding import ReceivedTokens

REMEMBERED_PIECES = 1 << 18
"""Maximum number of tokens whose text is remembered: more than the vocabularies in use."""
_INVISIBLE = re.compile(r'[^!"$-~]')
"""What the text of a token by itself may lack or have in addition: spaces, split characters, WordPiece's ##."""


class StopChecker:
    """Tells where turns end. `decode` converts ids to text; `eos_ids` are tokens that end a turn."""

    def __init__(self, decode: Callable[[Sequence[int]], str], eos_ids: frozenset[int] = frozenset()) -> None:
        self.decode, self.eos_ids = decode, eos_ids
        self.piece = lru_cache(REMEMBERED_PIECES)(lambda token: _INVISIBLE.sub("", decode([token])))
        """Returns the visible characters of a token by itself."""


class StopSearch:
    """Finds the end of one turn in its tokens while they arrive: cost O(new tokens), and one decoding at a stop string.

    A turn ends with its first prefix whose text contains a stop string. Decoding every prefix would cost O(tokens^2).
    The visible characters of the single tokens show which prefixes may be the first, and only those are decoded: text
    is the concatenation of its tokens, except for spaces at their borders and characters split between tokens.
    """

    def __init__(self, checker: StopChecker, stops: Sequence[str]) -> None:
        self._checker, self._stops = checker, stops
        self._marks = [_INVISIBLE.sub("", stop) for stop in stops]
        self._restart()

    def _restart(self) -> None:
        self._seen, self._tail = 0, ""
        """Number of tokens searched, and their last visible characters."""
        self._stopped: tuple[int, str] | None = None
        """Length of the first prefix with a stop string, and that string."""
        self._over = 0
        """Length of the prefix that ends in an eos id; 0: none yet."""

    def find(self, ids: Sequence[int]) -> tuple[int, str | int] | None:
        """Return (number of tokens up to and including the end, the stop string or token id); None: no end yet.

        ids  the tokens of the last call and further ones. Fewer, if some were dropped, start a new search
        """
        if len(ids) < self._seen:
            self._restart()
        if not self._over and not self._checker.eos_ids.isdisjoint(ids[self._seen :]):
            self._over = next(k for k, i in enumerate(ids, 1) if i in self._checker.eos_ids)
        ids = ids[: self._over or len(ids)]
        if self._stops and self._stopped is None:
            self._search(ids)
        self._seen = len(ids)
        # with byte fallback an incomplete character hides the ones before it: what is hidden now does not end the turn
        if self._stopped and (self._stopped[0] == len(ids) or self._stop_in(ids) is not None):
            return self._stopped
        return (self._over, ids[-1]) if self._over else None

    def _search(self, ids: Sequence[int]) -> None:
        pieces, most = [self._checker.piece(i) for i in ids[self._seen :]], max(1, *map(len, self._marks))
        whole = self._tail + "".join(pieces)
        if any(mark in whole for mark in self._marks):
            for k, piece in enumerate(pieces, self._seen + 1):
                text = self._tail + piece
                if any(mark in text for mark in self._marks) and (stop := self._stop_in(ids[:k])) is not None:
                    self._stopped = k, stop
                    return
                self._tail = text[-most:]
        self._tail = whole[-most:]

    def _stop_in(self, ids: Sequence[int]) -> str | None:
        text = self._checker.decode(ids)
        return next((stop for stop in self._stops if stop in text), None)


class TurnAssembler:
    """The tokens of a turn while they arrive. `stop_checker` None: rely on the engines to detect the end."""

    def __init__(self, request: GenerateRequest, stop_checker: StopChecker | None = None) -> None:
        self._request = request
        self._search = StopSearch(stop_checker, request.stop) if stop_checker is not None else None
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
        return self._search is not None and self._search.find([*self.ids, *more]) is not None

    def completion(self) -> Completion | None:
        """Return the completed turn, or None if it is not complete."""
        count, finish = len(self.ids), self._finish
        if self._search is not None and count and (finish is None or self.pieces > 1):
            found = self._search.find(self.ids)
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
