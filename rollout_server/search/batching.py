"""Queries that wait for one retriever share a POST.

    search --> queue --(a slot is free: in the next iteration of the event loop)--> POST of one or more --> answers

No timer: a query that finds a free slot is sent at once, with those that arrived in the same iteration. While all slots
are in use, queries wait, and the POST that ends makes room for one with all of them, up to a bound. An error in the
answer, the timeout and the cancellation of a query concern that query alone; a POST without waiting callers is
cancelled. If the retriever answers a POST of several queries wrongly, each is sent alone: one of them may be the cause.

Only queries to Foray's own retriever over an index share POSTs (`enabled`, set from `GET /info`). Behind another server
one slow query may hold up all of its POST, as a web search does, and its limits on lists are unknown.

    task         consumes              produces   waits for          unblocked by
    search-post  queries of the queue  answers    the retriever      its answer, `attempt_s`, the last caller's end
Up to `max_posts` at a time; ended by `close`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.runtime.lifecycle import cancel_all
from protocol.runtime.timing import loop_timeout
from protocol.search import Passage
from rollout_server.search.base import TIMEOUT, SearchError
from rollout_server.search.transport import SearchTransport

MAX_QUERIES, MAX_HITS = 64, 1024
"""Maximum queries in a POST, and maximum hits in its answer: reading more at a time would delay other trajectories."""
MIN_POSTS = 8
"""Slots: POSTs in flight at one retriever up to which a query does not wait. More if `ceiling` queries need more."""


@dataclass(eq=False)
class _Query:
    text: str
    answer: asyncio.Future[tuple[Passage, ...]]
    alone: bool = False
    post: asyncio.Task[None] | None = None


class QueryBatcher:
    """Sends queries to the retriever at `url`. Belongs to one event loop.

    ceiling    maximum number of queries in flight, ensured by the caller
    attempt_s  maximum timeout of a query in seconds
    """

    def __init__(self, transport: SearchTransport, url: str, *, ceiling: int, attempt_s: float) -> None:
        self._transport, self._url, self._attempt_s = transport, url, attempt_s
        self.max_queries = max(1, min(MAX_QUERIES, MAX_HITS // transport.topk))
        self.max_posts = max(MIN_POSTS, -(-ceiling // self.max_queries))
        self.enabled = False
        self._queue: deque[_Query] = deque()
        self._posts: dict[asyncio.Task[None], Sequence[_Query]] = {}
        self._scheduled = False

    async def search(self, query: str, timeout_s: float) -> tuple[Passage, ...]:
        """Return the passages for one query, best first. Raises SearchError: one instance for all of a lost POST."""
        if not self.enabled:
            return await self._transport.search(self._url, query, timeout_s)
        waiting = _Query(query, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._schedule()
        try:
            async with loop_timeout(timeout_s):
                return await waiting.answer
        except TimeoutError as error:
            raise SearchError(TIMEOUT, served=False) from error
        finally:
            waiting.answer.cancel()
            if not waiting.answer.cancelled():
                waiting.answer.exception()  # read: the caller may have been cancelled just now
            elif waiting.post is not None and all(query.answer.done() for query in self._posts.get(waiting.post, ())):
                waiting.post.cancel()

    async def close(self) -> None:
        """Cancel the POSTs in flight."""
        await cancel_all(self._posts)

    def _schedule(self) -> None:
        if not self._scheduled and self._queue and len(self._posts) < self.max_posts:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        while len(self._posts) < self.max_posts and (queries := self._take()):
            post = asyncio.create_task(self._post(queries), name="search-post")
            self._posts[post] = queries
            for query in queries:
                query.post = post
            post.add_done_callback(self._ended)

    def _take(self) -> list[_Query]:
        """Return the queries of the next POST, without those whose caller no longer waits."""
        taken: list[_Query] = []
        while self._queue and len(taken) < self.max_queries and not (taken and self._queue[0].alone):
            query = self._queue.popleft()
            if not query.answer.done():
                taken.append(query)
                if query.alone:
                    break
        return taken

    async def _post(self, queries: Sequence[_Query]) -> None:
        answers: Sequence[tuple[Passage, ...] | Exception]
        try:
            answers = await self._transport.search_all(self._url, [query.text for query in queries], self._attempt_s)
        except Exception as error:
            if isinstance(error, SearchError) and error.served and len(queries) > 1:
                for query in reversed(queries):
                    query.alone, query.post = True, None
                    self._queue.appendleft(query)
                return
            answers = [error] * len(queries)
        for query, answer in zip(queries, answers, strict=True):
            if query.answer.done():
                continue
            if isinstance(answer, Exception):
                query.answer.set_exception(answer)
            else:
                query.answer.set_result(answer)

    def _ended(self, post: asyncio.Task[None]) -> None:
        del self._posts[post]
        self._schedule()
