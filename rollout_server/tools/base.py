"""The tool interface: an argument in, text or passages or a named failure out.

The policy calls a tool by its tag, like the search: `<fetch> id </fetch>`. A new tool is one file with a settings class
and a callable, registered in `rollout_server/tools/__init__.py`, where `tests/contracts/test_tool.py` finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from pydantic import Field

from protocol.runtime.lifecycle import cancel_all
from protocol.search import Passage
from protocol.settings import Settings

CLOSED = "closed"
CONNECTIONS = 32
"""Maximum calls of one tool at its servers. Further calls are queued, within their timeout."""


@dataclass(frozen=True)
class ToolResult:
    """Result of a call. Untrusted: it is escaped and cut before the policy sees it.

    text      text for the policy, if there are no passages
    passages  shown like those of a search; they count as retrieved evidence, text does not. Without text and passages
              the policy sees the same as for a search that finds nothing
    latency_s seconds
    error     "" or a short word: the tool failed (timeout, unreachable, overloaded, ...), through no fault of the
              policy. `on_search_error` determines what happens
    mistake   "" or a short word: the call was invalid (unknown document, a program that raises), as explained in
              `text`. Used for counters; to the policy it is a normal observation
    """

    text: str = ""
    passages: tuple[Passage, ...] = ()
    latency_s: float = 0.0
    error: str = ""
    mistake: str = ""


class Tool(Protocol):
    """A tool owned by a process: built once, shared by all trajectories, closed at the end.

    name  its tag, also used in `Segment.tool` and in the counters
    """

    name: str

    async def __call__(self, argument: str) -> ToolResult:
        """Run a call. `argument` is the unchanged text between the tags.

        Never raises for failures of the tool or the policy. Returns in bounded time.
        """

    async def close(self) -> None:
        """Release all resources and cancel calls in flight. Safe to call twice. Later calls return an `error`."""


class ToolSettingsBase(Settings):
    """Base of all tool settings. A member of the union adds its `type`, which is its tag.

    sentence    describes the tool to the policy, inserted at `PromptTemplate.tools_after`; `{open}` and `{close}` stand
                for the tags of observations
    shows_ids   search results include passage ids while this tool is enabled
    retrieves   it returns documents, so it returns none when the search is disabled
    """

    sentence: ClassVar[str]
    shows_ids: ClassVar[bool] = False
    retrieves: ClassVar[bool] = False

    type: str
    max_calls: int | None = Field(default=None, ge=0)
    """Maximum calls per trajectory; further calls are answered with an error text. None: limited by `max_turns`
    only."""

    @property
    def told(self) -> str:
        """What the policy is told about the tool with these settings."""
        return self.sentence


class RemoteToolSettings(ToolSettingsBase):
    """A tool that asks a server."""

    max_chars: int = Field(default=20_000, ge=1)
    """Maximum characters of a result; the rest is dropped. `max_obs_tokens` then limits the observation."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Timeout of a call in seconds, with retries and the wait for a connection."""


class InflightCalls:
    """Calls of one tool: timed, cancelled with their caller, and ended with error `closed` when the tool is closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._in_flight: set[asyncio.Task[ToolResult]] = set()
        self._closed = False

    async def run(self, work: Coroutine[Any, Any, ToolResult]) -> ToolResult:
        """Return the result of `work` with its duration, or the error `closed` if the tool is closed."""
        started = time.monotonic()
        if self._closed:
            work.close()
            return ToolResult(error=CLOSED)
        task = asyncio.create_task(work, name=self._name)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        try:
            result = await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not self._closed or (caller and caller.cancelling()):
                raise
            result = ToolResult(error=CLOSED)
        return replace(result, latency_s=time.monotonic() - started)

    async def close(self) -> None:
        """Cancel all calls. Safe to call twice."""
        self._closed = True
        await cancel_all(self._in_flight)


class NoTool:
    """Replaces a tool for documents when the search is disabled: every call returns nothing, without an error."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, argument: str) -> ToolResult:
        return ToolResult()

    async def close(self) -> None:
        return None
