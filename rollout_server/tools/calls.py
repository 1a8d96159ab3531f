"""Calls of a tool in flight: timed, and ended as `closed` when the tool is closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from rollout_server.tools.base import ToolResult

CLOSED = "closed"


class Calls:
    """Belongs to one tool. A call whose caller is cancelled is cancelled with it."""

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
