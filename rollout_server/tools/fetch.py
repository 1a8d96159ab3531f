"""`<fetch> id </fetch>`: one document of the corpus by its id, from the retriever's `GET /passages/{id}`.

Uses one deadline, retries with jitter, a longer wait while no retriever is reachable, a size limit, no redirects, and
validated replies. Text of the policy is never used as an address: it becomes one quoted path segment of a configured
base URL, or the value of `?id=` if a path cannot contain it. An unknown id is a mistake of the policy, which sees an
error text; all other failures are errors of the tool.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import ClassVar, Literal
from urllib.parse import quote

from pydantic import Field, field_validator

from protocol.errors import UserError
from protocol.runtime.http.body import parse_json
from protocol.runtime.timing import LoopClock, backoff_s, loop_timeout
from protocol.search import Passage
from rollout_server.search.base import NO_FILES, NOT_JSON, OVERLOADED, TIMEOUT, UNREACHABLE, SearchError
from rollout_server.search.transport import HttpConnections
from rollout_server.tools.base import CONNECTIONS, InflightCalls, RemoteToolSettings, ToolResult

MAX_ID_CHARS = 1024
BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
GARBAGE = "garbage"
"""The answer is not a document, or a different one."""
RETRIED = frozenset({UNREACHABLE, NO_FILES, TIMEOUT, OVERLOADED, "http_408", "http_500", "http_502", "http_504"})
UNKNOWN = ToolResult("There is no document with this id.", mistake="unknown_id")


class FetchSettings(RemoteToolSettings):
    """A whole document by its id."""

    sentence: ClassVar[str] = (
        "You can read a whole document by <fetch> id </fetch>, where id is the id of a document that a search "
        "returned, and it will be returned between {open} and {close}."
    )
    shows_ids: ClassVar[bool] = True
    retrieves: ClassVar[bool] = True

    type: Literal["fetch"] = "fetch"
    urls: tuple[str, ...] = ()
    """Base URLs of the retrievers (`/passages/{id}` is appended), used in turn. Empty: those of the search."""
    outage_wait_s: float = Field(default=300.0, ge=0)
    """Timeout in seconds while no retriever is reachable, if longer than `deadline_s`. A restart of the retriever then
    costs time, not rewards, as in `rollout.search`."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class Fetch:
    """The fetch tool. May be created outside an event loop: the session opens at the first call."""

    name = "fetch"

    def __init__(self, settings: FetchSettings, urls: Sequence[str] | None) -> None:
        """Use `urls`, which may change, if the settings have none. Raises UserError if there are no retrievers."""
        urls = settings.urls or urls
        if urls is None:
            raise UserError(
                "the tool fetch has no retriever",
                why="neither the tool nor rollout.search has the URL of one",
                todo="set `urls` of the tool fetch in rollout.episode.tools",
            )
        self._settings = settings
        self._urls = urls
        self._next = random.randrange(1 << 16)
        self._connections = HttpConnections(limit=CONNECTIONS)
        self._calls = InflightCalls(self.name)

    async def __call__(self, argument: str) -> ToolResult:
        name = argument.strip()
        if not name or len(name) > MAX_ID_CHARS:
            return UNKNOWN
        return await self._calls.run(self._ask(name))

    async def close(self) -> None:
        await self._calls.close()
        await self._connections.close()

    async def _ask(self, name: str) -> ToolResult:
        """Return the document, or the error of the last attempt, within the deadline or the outage timeout."""
        last = SearchError(TIMEOUT)
        now = LoopClock.current().time
        try:
            async with loop_timeout(self._settings.deadline_s) as deadline:
                begun = since = now()
                for failures in itertools.count(1):
                    try:
                        return await self._attempt(name)
                    except SearchError as error:
                        last = error
                    # Jitter: thousands of trajectories must not retry at once.
                    wait = random.uniform(0.5, 1.0) * backoff_s(failures, BACKOFF_S, MAX_BACKOFF_S)
                    wait = max(last.retry_after_s, wait)
                    end = since + self._settings.deadline_s
                    if last.cause == UNREACHABLE:
                        end = max(end, begun + self._settings.outage_wait_s)
                        since = now() + wait  # a retriever that is reachable again has the whole deadline
                    if last.cause not in RETRIED or now() + wait >= end:
                        break
                    deadline.arm(end - now())
                    await asyncio.sleep(wait)
        except TimeoutError:
            pass  # the error of an earlier attempt is more informative than a timeout
        return ToolResult(error=GARBAGE if last.cause == NOT_JSON else last.cause)

    async def _attempt(self, name: str) -> ToolResult:
        """Send one request. Raises SearchError."""
        from yarl import URL

        if not self._urls:
            raise SearchError(UNREACHABLE, served=False)
        self._next += 1
        base = self._urls[self._next % len(self._urls)].rstrip("/") + "/passages"
        url = URL(address(base, name), encoded=True)
        status, raw = await self._connections.exchange("GET", url, self._settings.deadline_s, also=(404,))
        return self._passage(raw, name) if status == 200 else _unknown(raw)

    def _passage(self, raw: bytes, name: str) -> ToolResult:
        try:
            passage = Passage.model_validate(parse_json(raw))
        except ValueError as error:
            raise SearchError(GARBAGE) from error
        if passage.id != name:
            raise SearchError(GARBAGE)
        cut = passage.model_copy(update={"contents": passage.contents[: self._settings.max_chars]})
        return ToolResult(passages=(cut,))


def address(base: str, name: str) -> str:
    """Return the URL of the document `name`. All characters but letters, digits and `_.-~` are quoted.

    Uses `?id=` for ids that a path cannot contain: with a slash (servers treat %2F differently), `.`, `..`, line breaks
    and other control characters.
    """
    quoted = quote(name, safe="", errors="replace")
    if "/" in name or not name.strip(".") or not name.isprintable():
        return f"{base}?id={quoted}"
    return f"{base}/{quoted}"


def _unknown(raw: bytes) -> ToolResult:
    """Interpret a 404. A retriever sends it as JSON; any other 404 is not about the id but a tool error."""
    try:
        said = parse_json(raw)
    except ValueError as error:
        raise SearchError(GARBAGE) from error
    if not isinstance(said, dict) or "error" not in said:
        raise SearchError(GARBAGE)
    return UNKNOWN
