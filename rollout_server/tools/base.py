"""The interface to tools: an argument in, a text or passages out, and failures that have a name.

A tool is called by its tag, as the search is: `<fetch> id </fetch>`. A new one is one file with a settings class and a
callable, listed in `rollout_server/tools/__init__.py`; `tests/contracts/test_tool.py` finds it there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from pydantic import Field

from protocol.search import Passage
from protocol.settings import Settings

CLOSED = "closed"


@dataclass(frozen=True)
class ToolResult:
    """What a call brought. Untrusted text: it is escaped and cut before the policy sees it.

    text      what the policy sees, when there are no passages
    passages  what it is shown instead, as a search's are: they count as retrieved evidence, a text does not. Without
              either it sees what it sees of a search that finds nothing
    error     "" or a short word: the tool itself failed (timeout, unreachable, overloaded, ...), which says nothing
              about the policy; what then happens is `on_search_error`
    mistake   "" or a short word: the call was wrong (no such document, a program that raises) and `text` says so. For
              the counters; to the policy it is an observation like any other
    """

    text: str = ""
    passages: tuple[Passage, ...] = ()
    latency_s: float = 0.0
    error: str = ""
    mistake: str = ""


class Tool(Protocol):
    """A tool that a process owns: built once, shared by all rollouts, closed in the end.

    name  its tag, and its name in `Segment.tool` and in the counters
    """

    name: str

    async def __call__(self, argument: str) -> ToolResult:
        """`argument` is what stands between the tags, as the policy wrote it. Never raises for faults of the tool or of
        the policy, and ends in bounded time."""
        ...

    async def close(self) -> None:
        """Let go of everything, calls in flight included. Safe to call twice; a call after it has an `error`."""
        ...


class ToolSettingsBase(Settings):
    """What the settings of every tool have: a member of the union adds its `type`, which is its tag.

    sentence    describes the tool to the policy; it stands where the template says (`PromptTemplate.tools_after`), with
                `{open}` and `{close}` for the tags of the template's observations
    shows_ids   search results show the ids of their passages while this tool is enabled
    retrieves   what it brings are documents: it brings none where searching is switched off
    """

    sentence: ClassVar[str]
    shows_ids: ClassVar[bool] = False
    retrieves: ClassVar[bool] = False

    type: str
    max_calls: int | None = Field(default=None, ge=0)
    """Most calls in one trajectory; a further one is answered by saying so. None: only `max_turns` bounds them."""


class InflightCalls:
    """Calls of one tool: timed, cancelled with their caller, ended as `closed` when the tool is closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._in_flight: set[asyncio.Task[ToolResult]] = set()
        self._closed = False

    async def run(self, work: Coroutine[Any, Any, ToolResult]) -> ToolResult:
        """What `work` brings, with the time that it took; error `closed` when the tool is, or is being closed."""
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
        """End all calls. Safe to call twice."""
        self._closed = True
        tasks = list(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class NoTool:
    """Stands for a tool of documents where searching is switched off: every call brings nothing, without an error."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, argument: str) -> ToolResult:
        return ToolResult()

    async def close(self) -> None:
        return None
