"""Client of the retriever (`POST /retrieve`, `protocol.search`): deadline, retries, and errors that have a name.

One pooled keep-alive session serves all rollouts. A query has one deadline for everything: waiting for a connection,
every attempt, and the pauses between them. Identical queries in flight share one request, since the trajectories of a
group often ask the same thing at the same time. The reply is data of a stranger: its size is capped while it is read
and its shape is checked before anything uses it. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError, field_validator

from protocol.search import MAX_QUERY_CHARS, MAX_TOPK, Passage, SearchRequest, SearchResponse
from protocol.settings import Settings
from rollout_server.search.base import SearchResult, SearchService

if TYPE_CHECKING:
    import aiohttp

BACKOFF_S, MAX_BACKOFF_S, CONNECT_S = 0.05, 1.0, 3.0
RETRIED = frozenset({408, 429, 500, 502, 503, 504})


class HttpSearchSettings(Settings):
    """A retriever over HTTP, in Search-R1's dialect."""

    type: Literal["http"] = "http"
    urls: tuple[str, ...] = Field(default=("http://127.0.0.1:8000",), min_length=1)
    """Base addresses of the retrievers (`/retrieve` is appended). Queries go round; a retry goes to the next one."""
    topk: int = Field(default=3, ge=1, le=MAX_TOPK)
    """Passages per query."""
    deadline_s: float = Field(default=20.0, gt=0)
    """Longest wait for one query, retries and their pauses included."""
    connections: int = Field(default=128, ge=1)
    """Connections kept to the retrievers; more queries than that wait in line, within their deadline."""
    max_bytes: int = Field(default=4 << 20, ge=1024)
    """Largest reply that is read."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    def build(self) -> SearchService:
        return HttpSearch(self)


class _Failed(Exception):
    """One attempt failed. `again`: another attempt may do better; `wait_s`: not before that many seconds."""

    def __init__(self, error: str, *, again: bool, wait_s: float = 0.0) -> None:
        super().__init__(error)
        self.error, self.again, self.wait_s = error, again, wait_s


class HttpSearch:
    """See the module. Built outside an event loop; the session opens at the first query."""

    def __init__(self, settings: HttpSearchSettings) -> None:
        self._settings = settings
        self._urls = [url.rstrip("/") + "/retrieve" for url in settings.urls]
        self._next = random.randrange(len(self._urls))
        self._session: aiohttp.ClientSession | None = None
        self._in_flight: dict[str, asyncio.Task[tuple[tuple[Passage, ...], str]]] = {}
        self._closed = False

    async def __call__(self, query: str) -> SearchResult:
        started = time.monotonic()
        if self._closed:
            return SearchResult((), 0.0, "closed")
        query = query[:MAX_QUERY_CHARS]
        task = self._in_flight.get(query)
        if task is None:
            task = asyncio.create_task(self._ask(query), name="search")
            self._in_flight[query] = task
            task.add_done_callback(lambda _: self._in_flight.pop(query, None))
        try:
            # Shielded: one rollout that is cancelled must not take the answer from another that waits for it.
            passages, error = await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and not (caller and caller.cancelling()):
                return SearchResult((), time.monotonic() - started, "closed")
            raise
        return SearchResult(passages, time.monotonic() - started, error)

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, query: str) -> tuple[tuple[Passage, ...], str]:
        """Passages and "", or no passages and the error of the last attempt. Ends within the deadline."""
        last = _Failed("timeout", again=True)
        try:
            async with asyncio.timeout(self._settings.deadline_s) as deadline:
                body = SearchRequest(queries=[query], topk=self._settings.topk, return_scores=True).model_dump_json()
                pause = BACKOFF_S
                while True:
                    try:
                        return await self._attempt(body.encode()), ""
                    except _Failed as failed:
                        last = failed
                    # Jitter: thousands of rollouts must not come back in step.
                    wait = max(last.wait_s, random.uniform(pause / 2, pause))
                    when = deadline.when()
                    if not last.again or (when is not None and asyncio.get_running_loop().time() + wait >= when):
                        return (), last.error
                    await asyncio.sleep(wait)
                    pause = min(2 * pause, MAX_BACKOFF_S)
        except TimeoutError:
            # An earlier attempt's error says more than that time ran out during the next one.
            return (), last.error

    async def _attempt(self, body: bytes) -> tuple[Passage, ...]:
        """One request. Raises _Failed."""
        import aiohttp

        self._next = (self._next + 1) % len(self._urls)
        url = self._urls[self._next]
        try:
            async with self._open().post(
                url, data=body, headers={"Content-Type": "application/json"}, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise _refused(response.status, response.headers.get("Retry-After", ""))
                raw = await self._read(response)
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
            raise _Failed("unreachable", again=True) from error
        except aiohttp.ClientError as error:
            raise _Failed("garbage", again=False) from error
        return self._check(raw)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._settings.max_bytes:
                raise _Failed("too_large", again=False)
            parts.append(chunk)
        return b"".join(parts)

    def _check(self, raw: bytes) -> tuple[Passage, ...]:
        try:
            result = SearchResponse.model_validate_json(raw).result
        except (ValidationError, RecursionError) as error:
            raise _Failed("garbage", again=False) from error
        if len(result) != 1:
            raise _Failed("garbage", again=False)
        return tuple(hit.document for hit in result[0][: self._settings.topk])

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._settings.connections, keepalive_timeout=30),
                # A host that swallows packets must not use up the deadline while another could answer.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session


def _refused(status: int, retry_after: str) -> _Failed:
    error = "overloaded" if status in (429, 503) else f"http_{status}"
    wait = float(retry_after) if retry_after.isdecimal() else 0.0
    return _Failed(error, again=status in RETRIED, wait_s=wait)
