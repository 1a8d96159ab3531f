"""What people ask for: seqs that were given up, tried again (`foray dlq requeue`, or SADD on `Keys.requeue`).

A request stays in Redis until a durable checkpoint says that it was honoured; the same checkpoint says so when the
request could not be removed any more. So a crash in between honours it once, not twice and not never.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from learner.books import Books
from learner.history import History
from learner.redis_client import RedisUnavailable, RunStore
from learner.redis_errors import Tolerated
from protocol.codec import number_of
from protocol.ledger import NotReopenable

log = logging.getLogger(__name__)


class Requests:
    """`turn` is called each second by the keeper while tasks are issued; the rest belongs to the training thread."""

    def __init__(self, store: RunStore, books: Books, history: History) -> None:
        self._store, self._books, self._history = store, books, history
        self._tolerated = Tolerated()

    def turn(self) -> None:
        """Honours what can be honoured, and removes what cannot. Raises RedisUnavailable."""
        refused: list[bytes] = []
        for raw in self._store.requests():
            seq = number_of(raw)
            try:
                with self._books.lock:
                    if seq in self._books.requests:
                        continue  # honoured, and not in a checkpoint yet
                    was = self._books.reopen(seq)
                self._history.tell("requeued", f"seq {seq} was {was} and is tried again")
                log.info("seq %d was %s and is tried again, as a person asked", seq, was)
            except NotReopenable as error:
                shown = raw[:40].decode("utf-8", "replace")
                self._history.tell("requeue-refused", f"{shown}: {error}")
                log.warning("the request to try %r again is dropped: %s", shown, error)
                refused.append(raw)
        self._store.drop_requests(refused)

    def committed(self, seqs: Iterable[int]) -> None:
        """A durable checkpoint has these: their requests are dealt with."""
        done = list(seqs)
        try:
            if not self._tolerated(lambda: self._store.drop_requests(done)):
                return
        except RedisUnavailable as error:
            log.info("requests that were honoured are removed later: %s", error)
            return
        with self._books.lock:
            self._books.requests.difference_update(done)
