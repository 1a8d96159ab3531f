"""Whether the books close: verified at every checkpoint, told when they do not, and decisive at the end of a run.

By seq: issued = trained + filtered + stale + dead + in flight. By token: `learner/token_law.py`. Against Redis:
`learner/crosscheck.py`. Here too, because they happen at the same moments: `meta`, the run's history, and requests.
"""

from __future__ import annotations

import logging
from typing import Any

from learner.books import Books
from learner.crosscheck import CrossCheck
from learner.history import History
from learner.redis_client import RedisFull, RedisUnavailable, RunStore
from learner.requests import Requests
from protocol.errors import Fenced, StateLost
from protocol.meta import RunMeta

log = logging.getLogger(__name__)


class Audit:
    """Used by the training thread alone, but for `values`."""

    def __init__(
        self, store: RunStore, books: Books, history: History, requests: Requests, cross: CrossCheck, meta: RunMeta
    ) -> None:
        self._store, self._books, self._history = store, books, history
        self._requests, self._cross, self._meta = requests, cross, meta
        self._told = ""

    def begin(self) -> None:
        """The run begins, or goes on. Raises RedisUnavailable or StateLost, and may be called again."""
        self._store.write_meta(self._meta.fields())
        with self._books.lock:
            honoured = sorted(self._books.requests)
        self._requests.committed(honoured)
        self._tell(self._books.check(whole=False) or self._compared())

    def mended(self, why: str, *, epoch: int, lost: bool, again: bool) -> None:
        """All is there again. lost: streams or functions were gone. again: the lease had lapsed and was taken anew.

        Raises RedisUnavailable or StateLost, and may be called again.
        """
        try:
            self._store.write_meta(self._meta.fields())
        except Fenced as error:
            raise StateLost(f"the lease went again: {error}") from error  # whose it is now, regaining it says
        with self._books.lock:
            self._books.tally.state_lost += lost
            self._books.tally.lease_lapsed += again
        if lost:
            self._history.tell("state-lost", f"Redis had lost the run's state, which was made again: {why}")
        if again:
            self._history.tell("epoch", f"the lease had lapsed: epoch {epoch} begins ({why})")

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"redis": self._cross.to_state()}

    def committed(self, state: dict[str, Any], name: str) -> None:
        """The checkpoint `name` with `state` is in force, and what it decided is acknowledged."""
        self._history.tell("checkpoint", f"checkpoint {name} is in force")
        self._requests.committed(state["requests"])
        problem = self._books.check(whole=False)
        try:
            self._cross.committed(name)
            problem = problem or self._cross.look()
        except (RedisUnavailable, StateLost) as error:
            log.info("Redis' counts were not compared: %s", error)
        self._tell(problem)

    def problem(self) -> str:
        """At the end: where the books do not close; "" when they do. Raises RedisUnavailable or StateLost."""
        left = self._books.in_flight()
        return self._books.check() or (f"{len(left)} seqs are left: {left[:10]}" if left else "") or self._cross.look()

    def values(self) -> dict[str, float]:
        """Numbers for the metrics."""
        with self._books.lock:
            values = self._books.law.values() | self._cross.values()
            closes = bool(values["tokens_law_closes"]) and not self._told
            return values | {"tokens_law_closes": float(closes), "books_close": float(closes)}

    def _compared(self) -> str:
        try:
            return self._cross.look()
        except RedisFull as error:
            log.info("Redis' counts were not compared: %s", error)
            return ""

    def _tell(self, problem: str) -> None:
        if problem and problem != self._told:
            log.error("the books do not close: %s", problem)
            self._history.tell("books", f"the books do not close: {problem}")
        self._told = problem
