"""What every dialect's handler asks: queries in any spelling to answers, through cache and batcher.

handler --search()--> cache (LRU, by bytes) --> Batcher (joins equal queries, bounds, batches) --> Backend.search
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Sequence

from retriever.backends.base import Backend, Fault
from retriever.metrics import Metrics
from retriever.serving.admission import Room
from retriever.serving.batcher import Batcher
from retriever.serving.cache import Answer, AnswerCache, Key

EMPTY = Answer((), ())
"""The answer to a blank query."""


def normalise(query: str) -> str:
    """What is searched and cached: Unicode NFC, runs of white space as one blank, none at the ends."""
    return " ".join(unicodedata.normalize("NFC", query).split())


class Searches:
    """Belongs to one event loop. `search` is for any number of tasks, `run` for one."""

    def __init__(
        self,
        backend: Backend,
        *,
        by_run: bool,
        window_s: float,
        max_batch: int,
        lanes: int,
        cache: AnswerCache,
        room: Room,
        metrics: Metrics,
    ) -> None:
        """`by_run`: answers depend on the run that asks, else they are shared by all."""
        self._backend, self._by_run, self.room = backend, by_run, room
        self._fingerprint = backend.fingerprint
        self._cache, self._metrics = cache, metrics
        self._batcher: Batcher[Key, Answer] = Batcher(
            self._call,
            group=lambda key: (key.k, key.run),
            window_s=window_s,
            max_batch=max_batch,
            lanes=lanes,
            room=room,
            metrics=metrics,
            keep=self._remember,
        )

    async def search(self, queries: Sequence[str], k: int, run: str = "") -> list[Answer | Fault]:
        """One outcome a query, in order; a blank query has no hits. Raises room.Overloaded or batcher.Stopped."""
        run = run if self._by_run else ""
        keys = [Key(normalise(query), k, self._fingerprint, run) for query in queries]
        known: dict[Key, Answer | Fault] = {}
        unknown: list[Key] = []
        blank = 0
        for key in keys:
            if not key.query:
                blank += 1
                known[key] = EMPTY
            elif (answer := self._cache.get(key)) is not None:
                known[key] = answer
            else:
                unknown.append(key)
        metrics = self._metrics
        metrics.queries.inc(len(keys))
        if blank:
            metrics.blank.inc(blank)
        if cached := len(keys) - blank - len(unknown):
            metrics.cached.inc(cached)
        if unknown:
            known.update(await self._batcher.ask(unknown))
        return [known[key] for key in keys]

    async def run(self) -> None:
        """See Batcher.run."""
        await self._batcher.run()

    async def _call(self, keys: Sequence[Key]) -> Sequence[Answer | Fault]:
        # one search for the largest k, cut, would do for exact indexes; approximate ones have no such prefix property
        start = time.perf_counter()
        outcomes = await self._backend.search([key.query for key in keys], keys[0].k, keys[0].run)
        self._metrics.calls.inc()
        self._metrics.batch_size.observe(len(keys))
        self._metrics.search_seconds.observe(time.perf_counter() - start)
        return outcomes

    def _remember(self, key: Key, answer: Answer) -> None:
        self._metrics.searched.inc()
        self._cache.put(key, answer)
        self._metrics.cache_bytes.set(self._cache.num_bytes)
