"""Answers already given, least recently used first out, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

# Roughly what CPython adds to an answer: key, tuples, floats, one bytes header a document.
_OVERHEAD_ENTRY, _OVERHEAD_HIT = 400, 90


class Key(NamedTuple):
    """What decides an answer: the normalised query, the number of hits, the back-end's fingerprint, and the run, where
    there is a memory of it ("" else)."""

    query: str
    k: int
    fingerprint: str
    run: str = ""


class Answer(NamedTuple):
    """Hits of one query, best first: documents as JSON objects, ready to be sent, and their scores."""

    documents: tuple[bytes, ...]
    scores: tuple[float, ...]


class AnswerCache:
    """LRU map from Key to Answer that holds at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._answers: OrderedDict[Key, Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: Key) -> Answer | None:
        """The answer, which becomes the most recently used, or None."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: Key, answer: Answer) -> None:
        """Keep an answer, at the expense of the oldest. One that is larger than the whole cache is not kept."""
        size = _size(key, answer)
        if size > self._max_bytes:
            return
        old = self._answers.pop(key, None)
        self.num_bytes += size - (_size(key, old) if old is not None else 0)
        self._answers[key] = answer
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._answers.popitem(last=False))


def _size(key: Key, answer: Answer) -> int:
    text = 4 * len(key.query) + sum(map(len, answer.documents))
    return text + _OVERHEAD_ENTRY + _OVERHEAD_HIT * len(answer.documents)
